"""The form of a new run, with its YAML beside it."""
