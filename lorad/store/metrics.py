"""Steps and evaluations that count: those of the surviving lineage."""

from __future__ import annotations

import msgspec

from lorad.store.db import Row, Rows

LARGEST = 2**63 - 1  # what SQLite takes


def steps(store: Rows, run: str, after: int = 0, limit: int = 10000) -> list[Row]:
    """The first `limit` with step > after, in order: {step, attempt, at, version, samples, metrics}."""
    sql = (
        "SELECT step, attempt, at, version, samples, metrics FROM steps "
        "WHERE run = ? AND lineage = 1 AND step > ? ORDER BY step, attempt LIMIT ?"
    )
    return [row | {"metrics": msgspec.json.decode(row["metrics"])} for row in store.rows(sql, (run, after, limit))]


def sparse_steps(store: Rows, run: str, every: int, after: int = 0, limit: int = 10000) -> list[Row]:
    """Of what `steps` gives the first `limit` whose numbers are multiples of `every` (from 1 on), and the last of all.

    It looks at no others, so a million steps cost what their answer costs.
    """
    wanted = (
        "WITH RECURSIVE last(step) AS (SELECT max(step) FROM steps WHERE run = :run AND lineage = 1), "
        "wanted(step) AS (SELECT :first WHERE :first <= (SELECT step FROM last) UNION ALL "
        "SELECT step + :every FROM wanted WHERE step + :every <= (SELECT step FROM last) LIMIT :limit) "
    )
    sql = (
        f"{wanted} SELECT s.step, attempt, at, version, samples, metrics FROM "
        "(SELECT step FROM wanted UNION SELECT step FROM last WHERE step > :after) w CROSS JOIN steps s "
        "ON s.run = :run AND s.step = w.step AND s.lineage = 1 ORDER BY s.step, attempt"
    )
    first = min((after // every + 1) * every, LARGEST)
    found = store.rows(sql, {"run": run, "every": every, "after": after, "first": first, "limit": limit})
    return [row | {"metrics": msgspec.json.decode(row["metrics"])} for row in found]


def evals(store: Rows, run: str) -> list[Row]:
    """In order of steps: {step, attempt, at, version, score, problems, failed}."""
    columns = "step, attempt, at, version, score, problems, failed"
    return store.rows(f"SELECT {columns} FROM evals WHERE run = ? AND lineage = 1 ORDER BY step, attempt", (run,))
