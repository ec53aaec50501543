"""The index: runs, versions, checkpoints, pools, events and metrics in SQLite.

Rows come from the daemon's verbs and from the journals of runs, which are the truth: all can be built again
from them.

SQL stands here and in `migrations/` alone. A move of a run is a row of `lorad/states.py`, made in one
transaction with its event. `tests/store/` holds exactly-once ingest, and that a rebuilt database is the same.
"""
