"""Devices that users keep from lorad for a while, and why a run gave its device back.

runs.yielded: why it is stopped and queued again, where that is for no other run; NULL otherwise.
reservations.device: the UUID of a GPU, or the name of a slot of the CPU.
reservations.seconds: how long it lasts from its beginning; NULL: until `until`, or until it is released.
reservations.until: when it ends; NULL until it has begun, or until it is released.
reservations.began_at: when the device was free; NULL while lorad still works there.
reservations.urgent: 1 asks the runs there to stop at their next step.
"""

from sqlite_utils import Database

_SCHEMA = (
    "ALTER TABLE runs ADD COLUMN yielded TEXT",
    """CREATE TABLE reservations (
      device TEXT PRIMARY KEY,
      owner TEXT NOT NULL,
      owner_uid INTEGER NOT NULL,
      why TEXT NOT NULL,
      made_at REAL NOT NULL,
      seconds REAL,
      until REAL,
      began_at REAL,
      urgent INTEGER NOT NULL
    ) STRICT""",
)


def apply(db: Database) -> None:
    for statement in _SCHEMA:
        db.conn.execute(statement)
