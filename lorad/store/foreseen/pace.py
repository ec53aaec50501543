"""How fast runs are, as measured by the clock on a run itself or on the runs that are most like it."""

from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct

from lorad.store.db import Rows

_STEPS = 20  # of the newest ones, over which a pace is measured
_ALIKE = 16  # runs of the same base that are looked at
_OTHER_KEYS = frozenset({"name", "seed", "resources", "tags", "notify", "loggers", "checkpoint"})


class Pace(Struct, frozen=True):
    """How fast a run was.

    step_seconds: seconds from one step to the next, with everything in between.
    begin_seconds: seconds from its start until it worked on its first step.
    last_at: Unix time of its last step.
    """

    step_seconds: float
    begin_seconds: float = 0.0
    last_at: float = 0.0


def pace(store: Rows, run: str, attempt: int | None = None) -> Pace | None:
    """Measure the newest steps of one attempt, by default the newest that made two; None without two."""
    if attempt is None:
        sql = "SELECT attempt FROM steps WHERE run = ? GROUP BY attempt HAVING count(*) > 1 ORDER BY 1 DESC"
        attempts = store.tuples(f"{sql} LIMIT 1", (run,))
        if not attempts:
            return None
        attempt = attempts[0][0]
    sql = "SELECT step, at FROM steps WHERE run = ? AND attempt = ? ORDER BY step DESC LIMIT ?"
    newest = store.tuples(sql, (run, attempt, _STEPS + 1))
    if len(newest) < 2 or newest[0][0] <= newest[-1][0]:
        return None
    seconds = max(0.0, newest[0][1] - newest[-1][1]) / (newest[0][0] - newest[-1][0])
    sql = (
        "SELECT a.started_at, s.at FROM attempts a JOIN steps s ON s.run = a.run AND s.attempt = a.attempt "
        "WHERE a.run = ? AND a.attempt = ? ORDER BY s.step LIMIT 1"
    )
    begin = [max(0.0, first - began - seconds) for began, first in store.tuples(sql, (run, attempt))]
    return Pace(seconds, begin[0] if begin else 0.0, newest[0][1])


def pace_of_alike(store: Rows, run: str, spec: str, base: str) -> Pace | None:
    """Measure the newest run of the same base and the same spec, or else of the same base; None without one.

    spec: JSON text. Name, seed, number of steps and the like may differ.
    """
    sql = (
        "SELECT name, spec FROM runs WHERE base = ? AND step > 1 AND name <> ? "
        "AND coalesce(json_extract(spec, '$.algorithm.name'), '') <> 'tinker' "
        "ORDER BY created_at DESC, rowid DESC LIMIT ?"
    )
    others = [(name, _kind(other) == _kind(spec)) for name, other in store.tuples(sql, (base, run, _ALIKE))]
    for name, _ in sorted(others, key=lambda other: not other[1]):
        if (measured := pace(store, name)) is not None:
            return measured
    return None


@lru_cache(maxsize=1024)
def _kind(spec: str) -> str:
    """Keep of a spec what its pace may depend on."""
    plain: dict[str, Any] = msgspec.json.decode(spec)
    kept = {key: value for key, value in plain.items() if key not in _OTHER_KEYS}
    trainer = {key: value for key, value in kept.get("trainer", {}).items() if key not in ("steps", "lr")}
    return msgspec.json.encode({**kept, "trainer": trainer}, order="sorted").decode()
