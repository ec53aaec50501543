"""What users write on runs, tags and a note; and groups of runs, of which so many work at a time.

runs.tags: a JSON array of words.
runs.queue_group: `resources.group` of the spec.
queue_groups.runs: how many of its runs may work; NULL is no limit.
"""

from sqlite_utils import Database

_SCHEMA = (
    "ALTER TABLE runs ADD COLUMN tags TEXT NOT NULL DEFAULT '[]'",
    "ALTER TABLE runs ADD COLUMN note TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE runs ADD COLUMN queue_group TEXT",
    """CREATE TABLE queue_groups (
      owner_uid INTEGER NOT NULL,
      name TEXT NOT NULL,
      runs INTEGER,
      PRIMARY KEY (owner_uid, name)
    ) STRICT""",
)


def apply(db: Database) -> None:
    for statement in _SCHEMA:
        db.conn.execute(statement)
