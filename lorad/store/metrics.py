"""Steps and evaluations that count: those of the surviving lineage."""

from __future__ import annotations

import msgspec

from lorad.store.db import Row, Rows


def steps(store: Rows, run: str, after: int = 0, limit: int = 10000) -> list[Row]:
    """The first `limit` with step > after, in order: {step, attempt, at, version, samples, metrics}."""
    sql = (
        "SELECT step, attempt, at, version, samples, metrics FROM steps "
        "WHERE run = ? AND lineage = 1 AND step > ? ORDER BY step, attempt LIMIT ?"
    )
    return [row | {"metrics": msgspec.json.decode(row["metrics"])} for row in store.rows(sql, (run, after, limit))]


def evals(store: Rows, run: str) -> list[Row]:
    """In order of steps: {step, attempt, at, version, score, problems, failed}."""
    columns = "step, attempt, at, version, score, problems, failed"
    return store.rows(f"SELECT {columns} FROM evals WHERE run = ? AND lineage = 1 ORDER BY step, attempt", (run,))
