"""The index: runs, versions, checkpoints, pools, events and metrics in SQLite."""
