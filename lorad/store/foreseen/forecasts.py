"""Forecasts that were given to runs that wait, and what happened."""

import statistics
from collections.abc import Collection

from msgspec import Struct

from lorad.store.db import Rows, Store, insert_row

_OPEN = "started_at IS NULL AND void = 0"


class _Accuracy(Struct, frozen=True):
    """How forecasts compare with what happened.

    count: how many runs with a forecast started.
    off: the median error, as a share of the time that the run waited from the forecast on; None without any.
    """

    count: int = 0
    off: float | None = None


def open_forecasts(store: Rows) -> set[str]:
    """List the runs that have a forecast and still wait."""
    return {run for (run,) in store.tuples(f"SELECT run FROM forecasts WHERE {_OPEN}")}


def give(store: Store, run: str, *, at: float, starts_at: float, after: str) -> None:
    """Keep what was foreseen for a run that waits."""
    with store.write() as connection:
        insert_row(connection, "forecasts", {"run": run, "at": at, "starts_at": starts_at, "after": after})


def started(store: Store, run: str, at: float) -> None:
    """Note that a run starts, which may have a forecast."""
    with store.write() as connection:
        connection.execute(f"UPDATE forecasts SET started_at = ? WHERE run = ? AND {_OPEN}", (at, run))


def void(store: Store, runs: Collection[str]) -> None:
    """Note that these runs do not wait any more, and did not start."""
    with store.write() as connection:
        sql = f"UPDATE forecasts SET void = 1 WHERE run = ? AND {_OPEN}"
        connection.executemany(sql, [(run,) for run in sorted(runs)])


def accuracy(store: Rows, since: float) -> _Accuracy:
    """Compare the forecasts of runs that started since then with when they did."""
    sql = "SELECT at, starts_at, started_at FROM forecasts WHERE started_at >= ?"
    off = [abs(began - said) / max(began - at, 1.0) for at, said, began in store.tuples(sql, (since,))]
    return _Accuracy(len(off), statistics.median(off) if off else None)
