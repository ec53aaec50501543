"""Checkpoints from which a run can go on."""

from __future__ import annotations

import time

from lorad.store.db import Row, Rows, Store


def checkpoints(store: Rows, run: str) -> list[Row]:
    """Those that count and are not deleted, the newest last: {run, step, attempt, version, path, bytes, created_at}.

    `path` is absolute.
    """
    sql = (
        "SELECT c.run, c.step, c.attempt, c.version, r.directory || '/' || c.path AS path, c.bytes, c.created_at "
        "FROM checkpoints c JOIN runs r ON r.name = c.run "
        "WHERE c.run = ? AND c.lineage = 1 AND c.deleted_at IS NULL ORDER BY c.step, c.attempt"
    )
    return store.rows(sql, (run,))


def mark_deleted(store: Store, run: str, step: int, attempt: int) -> None:
    """Say so before its directory goes, so that nobody resumes from half of it."""
    with store.write() as connection:
        connection.execute(
            "UPDATE checkpoints SET deleted_at = ? WHERE run = ? AND step = ? AND attempt = ?",
            (time.time(), run, step, attempt),
        )
