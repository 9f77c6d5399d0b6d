"""`python -m vbpipe.cli`."""

from vbpipe.cli import main

main()
