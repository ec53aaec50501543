"""Steps and evaluations of the surviving lineage, which are the ones that count."""

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec
from msgspec import Struct

from lorad.protocol.evals import best_first, chosen
from lorad.records.measured import Step
from lorad.states import ACTIVE, RunState
from lorad.store.db import Row, Rows
from lorad.store.rows import EvalRow, eval_row

_EVAL = ", ".join(field for field in EvalRow.__struct_fields__ if field != "perplexity")  # columns
_LARGEST = 2**63 - 1  # what SQLite takes
_PAGE_BYTES = 16 << 20  # of metrics in one answer: 10,000 steps of 80 metrics


def steps(store: Rows, run: str, after: int = 0, limit: int = 10000) -> list[Step]:
    """List the first `limit` steps after `after`, in order, as many as fit into an answer."""
    sql = (
        "SELECT step, attempt, at, version, samples, metrics FROM steps "
        "WHERE run = ? AND lineage = 1 AND step > ? ORDER BY step, attempt LIMIT ?"
    )
    return _fitting(store.rows(sql, (run, after, limit)))


def _fitting(rows: Sequence[Row]) -> list[Step]:
    """Return the first steps whose metrics fit into an answer."""
    sizes = accumulate(len(row["metrics"]) for row in rows)
    fitting = (row for row, size in zip(rows, sizes, strict=True) if size <= _PAGE_BYTES)
    return [Step(**row | {"metrics": msgspec.json.decode(row["metrics"])}) for row in fitting]


def sparse_steps(store: Rows, run: str, every: int, after: int = 0, limit: int = 10000) -> list[Step]:
    """List the first `limit` steps after `after` whose numbers are multiples of `every`, and the last step of
    all.

    It reads no others, so the cost depends on the answer alone, even with a million steps.
    """
    numbers = (
        "WITH RECURSIVE last(step) AS (SELECT max(step) FROM steps WHERE run = :run AND lineage = 1), "
        "numbers(step) AS (SELECT :first WHERE :first <= (SELECT step FROM last) UNION ALL "
        "SELECT step + :every FROM numbers WHERE step + :every <= (SELECT step FROM last) LIMIT :limit) "
    )
    sql = (
        f"{numbers} SELECT s.step, attempt, at, version, samples, metrics FROM "
        "(SELECT step FROM numbers UNION SELECT step FROM last WHERE step > :after) w CROSS JOIN steps s "
        "ON s.run = :run AND s.step = w.step AND s.lineage = 1 ORDER BY s.step, attempt"
    )
    first = min((after // every + 1) * every, _LARGEST)
    rows = store.rows(sql, {"run": run, "every": every, "after": after, "first": first, "limit": limit})
    return _fitting(rows)


def evals(store: Rows, run: str) -> list[EvalRow]:
    """List the evals of a run that count, in order of steps."""
    sql = f"SELECT {_EVAL} FROM evals WHERE run = ? AND lineage = 1 ORDER BY step, attempt"
    return [eval_row(row) for row in store.rows(sql, (run,))]


def figures_at(store: Rows, run: str, step: int) -> dict[str, float | None]:
    """Read the figures of a step and of the evaluation after it, by name."""
    rows = steps(store, run, after=step - 1, limit=1)
    metrics = {**rows[0].metrics} if rows and rows[0].step == step else {}
    evaluated = newest_eval(store, run, step, step)
    return metrics | (evaluated.figures if evaluated else {})


class _SamplesFile(Struct, frozen=True):
    """The file with the samples of a step.

    path: relative to the run's directory.
    """

    path: str
    sha256: str


def samples_file(store: Rows, run: str, step: int) -> _SamplesFile | None:
    """Find the file with the samples of a step; None where the step does not count."""
    which = "run = ? AND step = ? AND lineage = 1 ORDER BY attempt DESC"
    row = store.row(f"SELECT samples AS path, samples_sha256 AS sha256 FROM steps WHERE {which}", (run, step))
    return None if row is None else _SamplesFile(**row)


def furthest_steps(store: Rows, run: str) -> dict[int, int]:
    """Find the last step of each attempt that made one, whether it still counts or not."""
    return dict(store.tuples("SELECT attempt, max(step) FROM steps WHERE run = ? GROUP BY attempt", (run,)))


def newest_eval(store: Rows, run: str, first: int, last: int) -> EvalRow | None:
    """Read the newest evaluation of these steps; None where there is none."""
    sql = (
        f"SELECT {_EVAL} FROM evals WHERE run = ? AND lineage = 1 "
        "AND step BETWEEN ? AND ? ORDER BY step DESC, attempt DESC LIMIT 1"
    )
    row = store.row(sql, (run, first, last))
    return None if row is None else eval_row(row)


def best_evals(store: Rows, run: str, best_by: str | None) -> tuple[str, list[EvalRow]]:
    """Return the metric by which evaluations are compared, and those that count, the best first.

    best_by: `checkpoint.best_by` of the spec.

    Returns "" and no evaluations where nothing was measured.
    """
    rows = evals(store, run)
    figures = [row.figures for row in rows]
    metric = chosen(best_by, figures)
    return ("", []) if metric is None else (metric, [rows[place] for place in best_first(metric, figures)])


def best_eval(store: Rows, run: str) -> float | None:
    """Read the highest score of all evaluations; None where there is none."""
    score: float | None = store.rows(
        "SELECT max(score) AS score FROM evals WHERE run = ? AND lineage = 1", (run,)
    )[0]["score"]
    return score


def mean_metric(store: Rows, run: str, first: int, last: int, count: int, metric: str) -> float | None:
    """Compute the mean over the last `count` of these steps; None where there is none."""
    sql = (
        "SELECT avg(value) AS score FROM (SELECT json_extract(metrics, '$.' || ?) AS value FROM steps "
        "WHERE run = ? AND lineage = 1 AND step BETWEEN ? AND ? ORDER BY step DESC LIMIT ?)"
    )
    score: float | None = store.rows(sql, (metric, run, first, last, count))[0]["score"]
    return score


class StepTotals(Struct, frozen=True):
    """Sums over all steps that were ever taken in.

    rowid: the newest row that is part of the sums.
    """

    rowid: int = 0
    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    published: int = 0
    publish_seconds: float = 0.0
    failed_rewards: float = 0.0
    skipped_updates: float = 0.0


def add_new_steps(store: Rows, before: StepTotals) -> StepTotals:
    """Add the steps that came after `before`. Steps of removed runs that it has still count."""
    newest = store.rows("SELECT coalesce(max(rowid), 0) AS n FROM steps")[0]["n"]
    if newest <= before.rowid:
        return msgspec.structs.replace(before, rowid=newest)
    sql = (
        "SELECT count(*) AS steps, total(json_extract(metrics, '$.tokens')) AS tokens, "
        "total(json_extract(metrics, '$.seconds')) AS seconds, count(json_extract(metrics, "
        "'$.seconds_publish')) AS published, total(json_extract(metrics, '$.seconds_publish')) AS "
        "publish_seconds, total(json_extract(metrics, '$.failed_rewards')) AS failed_rewards, "
        "total(json_extract(metrics, '$.skipped_updates')) AS skipped_updates FROM steps WHERE rowid > ?"
    )
    (more,) = store.rows(sql, (before.rowid,))
    return StepTotals(newest, **{key: getattr(before, key) + value for key, value in more.items()})


def ended_attempts(store: Rows) -> dict[str, int]:
    """Count the attempts that ended, by reason."""
    sql = (
        "SELECT coalesce(reason, '') AS reason, count(*) AS n FROM attempts WHERE ended_at IS NOT NULL "
        "GROUP BY 1"
    )
    return {row["reason"] or "unknown": row["n"] for row in store.rows(sql)}


def waits(store: Rows) -> Iterator[float]:
    """Yield the seconds that each queued run has waited."""
    last = "SELECT at FROM events WHERE run = ? AND kind = 'state' ORDER BY id DESC LIMIT 1"
    for run in store.rows("SELECT name, created_at FROM runs WHERE state = ?", (RunState.QUEUED,)):
        since = (store.row(last, (run["name"],)) or {"at": run["created_at"]})["at"]
        yield max(0.0, time.time() - since)


class _Reading(Struct, frozen=True):
    """How far the journal of an active run was taken in.

    offset: bytes that were taken in.
    newest: Unix time of the run's newest event; None without one.
    """

    run: str
    directory: str
    offset: int
    newest: float | None


def readings(store: Rows) -> list[_Reading]:
    """Find how far the journal of each active run was taken in."""
    marks = ", ".join("?" for _ in ACTIVE)
    sql = f"""
    SELECT r.name, r.directory, coalesce(o."offset", 0) AS "offset",
      (SELECT at FROM events e WHERE e.run = r.name ORDER BY id DESC LIMIT 1) AS newest
    FROM runs r LEFT JOIN journal_offsets o ON o.run = r.name WHERE r.state IN ({marks})
    """
    return [_Reading(*row.values()) for row in store.rows(sql, ACTIVE)]
