"""When runs that waited were expected to start, and when they did.

forecasts.at: When it was said, the first time that it was known after the run was queued.
forecasts.starts_at, forecasts.after: When the run was to start, and which run was to end before.
forecasts.started_at: When it did; NULL while it waits.
forecasts.void: 1 when the run left the queue otherwise.
"""

from sqlite_utils import Database

_SCHEMA = (
    """CREATE TABLE forecasts (
      id INTEGER PRIMARY KEY,
      run TEXT NOT NULL,
      at REAL NOT NULL,
      starts_at REAL NOT NULL,
      after TEXT NOT NULL DEFAULT '',
      started_at REAL,
      void INTEGER NOT NULL DEFAULT 0
    ) STRICT""",
    "CREATE INDEX forecasts_that_are_open ON forecasts (run) WHERE started_at IS NULL AND void = 0",
    "CREATE INDEX forecasts_by_start ON forecasts (started_at)",
)


def apply(db: Database) -> None:
    for statement in _SCHEMA:
        db.conn.execute(statement)
