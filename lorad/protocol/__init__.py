"""What processes of lorad say to each other: calls of a pool, journals, heartbeats, files between two.

All are Structs, checked where they come in; arrays travel as raw buffers behind a msgpack header.

A verb of a pool is a Struct of `protocol/calls.py`, a fact of a run one of `protocol/journal.py`. A field may
be added with a default, and never changes its meaning: a daemon is upgraded under running jobs.
`tests/protocol/` holds frames and journals, `tests/faults/test_upgrade.py` upgrades and ways back.
"""
