"""Which trainers and engines there are, how they are installed, and whether they work here.

It knows names: classes by `backends/registry.py`, commands by `backends/recipes.py`; what is installed it
learns from the interpreters that config.yaml names.

A backend is a row of the registry; nothing here imports one before it is needed. `tests/backends/` holds the
commands and what `lorad doctor` says, `tests/engines/real/` and `tests/trainers/real/` that they are true.
"""
