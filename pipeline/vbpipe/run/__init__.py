"""Run a plan: each step once, in its own process, its result in the store."""
