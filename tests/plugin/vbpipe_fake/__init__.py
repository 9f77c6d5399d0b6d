"""A third-party plug-in as a user would write one: put this folder on PYTHONPATH and it is installed."""
