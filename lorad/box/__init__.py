"""What holds for a whole machine: its configuration, where files lie, tokens, and what it grants.

It reads `config.yaml`, the environment, `/proc`, `/sys` and NVML, and decides nothing about runs.

A key of the configuration is a field of `box/config.py`, a place of a file one of `box/paths.py`, for all
rooms. `tests/box/` holds it.
"""
