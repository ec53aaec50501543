"""What held-out completions come to, beside the reward of greedy ones."""

from sqlite_utils import Database

COLUMNS = (
    ("evals", "nll"),
    ("evals", "accuracy"),
    ("runs", "nll_first"),
    ("runs", "nll_last"),
    ("runs", "accuracy_last"),
)


def apply(db: Database) -> None:
    for table, column in COLUMNS:
        db.conn.execute(f"ALTER TABLE {table} ADD COLUMN {column} REAL")
