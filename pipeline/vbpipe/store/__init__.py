"""Keep what steps made, named by its bytes, so that no work is done twice and no wrong byte is ever handed out."""

from __future__ import annotations

from vbpipe.store.collect import GcReport
from vbpipe.store.entry import Entry
from vbpipe.store.explain import Change, Explanation, Provenance, differences
from vbpipe.store.inspect import Damage
from vbpipe.store.locks import Holder
from vbpipe.store.store import Store
from vbpipe.store.tree import StoredFile, contents, tree_digest
from vbpipe.store.verify import VerifyReport

__all__ = [
    "Change",
    "Damage",
    "Entry",
    "Explanation",
    "GcReport",
    "Holder",
    "Provenance",
    "Store",
    "StoredFile",
    "VerifyReport",
    "contents",
    "differences",
    "tree_digest",
]
