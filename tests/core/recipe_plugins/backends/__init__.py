"""Backends of the tests of recipes."""
