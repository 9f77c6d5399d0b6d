"""No backends of its own."""
