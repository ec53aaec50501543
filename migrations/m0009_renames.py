"""An event may get another name of its run, where the run is renamed; nothing else of it ever changes.

events.kind `renamed`: on the name that the run had, with `to`, and its newest attempt and version, so that a
    later run of that name uses none of their numbers again; on the name that it has since, with `from`.
"""

from sqlite_utils import Database

_SCHEMA = (
    "DROP TRIGGER events_never_change",
    "CREATE TRIGGER events_never_change BEFORE UPDATE OF id, at, kind, data ON events BEGIN "
    "SELECT RAISE(ABORT, 'events never change'); END",
    "CREATE INDEX renames ON events (run) WHERE kind = 'renamed'",
)


def apply(db: Database) -> None:
    for statement in _SCHEMA:
        db.conn.execute(statement)
