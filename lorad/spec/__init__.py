"""What a run is asked to do: the keys of a spec, their YAML, and how mistakes are reported.

It gets the text that a user wrote, with overrides; it opens no file and asks no daemon.

A key is a field of its section's Struct, with its sentence and bounds there: forms, docs and the JSON Schema
follow. `tests/spec/` holds text, errors and schema.
"""
