"""The stages that come with vbpipe: one file each; the file name is the name in recipes."""
