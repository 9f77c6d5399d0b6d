"""What a server installs: open a bundle, check it, run it. Needs neither torch nor anything that builds."""

from vbpipe.runtime.bundle import MANIFEST, Bundle, Claim, FileFacts, Golden, Manifest, check_files, load, read_manifest

__all__ = ["MANIFEST", "Bundle", "Claim", "FileFacts", "Golden", "Manifest", "check_files", "load", "read_manifest"]
