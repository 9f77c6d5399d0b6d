"""Stages and backends that only say which options they have, for the tests of recipes."""
