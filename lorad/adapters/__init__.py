"""Adapters outside of any backend: names, PEFT files, validation, version directories.

Its arrays come from trainers, as numpy, and from directories that lorad or another tool wrote.

A setting of PEFT is a row of `adapters/settings.py`, a name of another tool's one of `adapters/forms.py`. A
version directory that was written never changes. `tests/adapters/` holds the bytes that are written, and
`tests/models/test_merged_files.py` that PEFT computes the same of them.
"""
