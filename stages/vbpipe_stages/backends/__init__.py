"""One file per engine runtime."""
