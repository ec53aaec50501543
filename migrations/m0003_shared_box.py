"""Distinguish several people on one box, and keep why attempts ended.

runs.preempted: the run of higher priority that it makes room for.
attempts.detail: why it ended, as text.
owner_uid of aliases and sweeps: user id of who made them; -1 in rows of earlier versions whose run is gone.
told_seq, told_crc of journal_offsets: while a journal is read again, the last record of before; 0 otherwise.
"""

from __future__ import annotations

from sqlite_utils import Database

STATEMENTS = (
    "ALTER TABLE runs ADD COLUMN preempted TEXT",
    "ALTER TABLE attempts ADD COLUMN detail TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE aliases ADD COLUMN owner_uid INTEGER NOT NULL DEFAULT -1",
    "ALTER TABLE sweeps ADD COLUMN owner_uid INTEGER NOT NULL DEFAULT -1",
    "ALTER TABLE journal_offsets ADD COLUMN told_seq INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE journal_offsets ADD COLUMN told_crc INTEGER NOT NULL DEFAULT 0",
    "UPDATE aliases SET owner_uid = coalesce((SELECT owner_uid FROM runs WHERE name = aliases.run), -1)",
    "UPDATE sweeps SET owner_uid = coalesce((SELECT max(owner_uid) FROM runs WHERE runs.sweep = "
    "sweeps.sweep), -1)",
    "CREATE INDEX runs_by_end ON runs (ended_at)",
    "CREATE INDEX runs_by_owner ON runs (owner_uid, state)",
)


def apply(db: Database) -> None:
    for statement in STATEMENTS:
        db.conn.execute(statement)
