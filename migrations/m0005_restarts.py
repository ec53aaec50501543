"""When a run that the daemon queued again may be placed.

runs.restart_at: Unix time; NULL for a run that waits for no automatic restart.
"""

from __future__ import annotations

from sqlite_utils import Database


def apply(db: Database) -> None:
    db.conn.execute("ALTER TABLE runs ADD COLUMN restart_at REAL")
