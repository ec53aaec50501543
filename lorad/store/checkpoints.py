"""Checkpoints from which a run can resume."""

import time

from lorad.records.versions import Checkpoint
from lorad.store.db import Rows, Store, update_rows
from lorad.store.rows import CheckpointPlace


def checkpoints(store: Rows, run: str) -> list[Checkpoint]:
    """List the checkpoints of a run that count and are not deleted, the newest last."""
    sql = (
        "SELECT c.run, c.step, c.attempt, c.version, r.directory || '/' || c.path AS path, c.bytes, "
        "c.created_at FROM checkpoints c JOIN runs r ON r.name = c.run "
        "WHERE c.run = ? AND c.lineage = 1 AND c.deleted_at IS NULL ORDER BY c.step, c.attempt"
    )
    return [Checkpoint(**row) for row in store.rows(sql, (run,))]


def ever_made(store: Rows, run: str | None = None) -> set[tuple[str, int, int]]:
    """List run, step and attempt of every checkpoint that was ever made, by one run or by all."""
    which, values = ("", ()) if run is None else ("WHERE run = ?", (run,))
    return {*store.tuples(f"SELECT run, step, attempt FROM checkpoints {which}", values)}


def not_deleted(store: Rows, *, lineage: bool) -> list[CheckpointPlace]:
    """List the checkpoints of all runs that should have their files.

    lineage: leave out those that a rewind passed.
    """
    which = "AND c.lineage = 1" if lineage else ""
    sql = f"""
    SELECT c.run, c.step, c.attempt, r.directory || '/' || c.path AS path
    FROM checkpoints c JOIN runs r ON r.name = c.run WHERE c.deleted_at IS NULL {which} ORDER BY c.run, c.step
    """
    return [CheckpointPlace(**row) for row in store.rows(sql)]


def mark_deleted(store: Store, run: str, step: int, attempt: int) -> None:
    """Mark a checkpoint as deleted before its directory goes, so that nobody resumes from half of it."""
    with store.write() as connection:
        update_rows(
            connection, "checkpoints", {"deleted_at": time.time()}, run=run, step=step, attempt=attempt
        )
