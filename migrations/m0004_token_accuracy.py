"""The share of held-out tokens that are right."""

from sqlite_utils import Database

COLUMNS = (("evals", "token_accuracy"), ("runs", "token_accuracy_last"))


def apply(db: Database) -> None:
    for table, column in COLUMNS:
        db.conn.execute(f"ALTER TABLE {table} ADD COLUMN {column} REAL")
