"""Who used how much: what pools report, and the tokens of steps.

Use is kept by the hour, so that a time stands for the hour that it is in. What a pool reports twice replaces
its own row and counts once.
"""

import math
import sqlite3
from typing import Literal

from msgspec import Struct

from lorad.protocol.status import Use, Uses
from lorad.records.bill import BillLine
from lorad.store.db import Rows, Store
from lorad.store.events import name_of_attempt

HOUR = 3600
HALF_LIVES = 20  # of which use counts; what is older is less than a millionth of itself
Hours = list[tuple[int, float]]  # hours, and the device-seconds that were held in each
By = Literal["run", "user", "sweep", "alias", "pool", "day"]

_COLUMNS = (
    *("hour", "run", "attempt", "step", "alias", "held", "busy", "generated", "trained", "served"),
    *("prompts", "cached", "joules", "memory"),
)
# of the values of a row that is there already and those that come, the greater: counters only grow
_GREATER = ", ".join(
    f"{name} = max({name}, excluded.{name})"
    for name in ("held", "busy", "generated", "trained", "served", "prompts", "cached", "memory")
)
_PUT = (
    f"INSERT INTO uses (life, entry, owner, owner_uid, sweep, gone, {', '.join(_COLUMNS)}) "
    f"VALUES ({', '.join('?' * (6 + len(_COLUMNS)))}) ON CONFLICT DO UPDATE SET {_GREATER}, "
    "joules = coalesce(max(joules, excluded.joules), joules, excluded.joules)"
)
_BEGIN = (
    "INSERT INTO lives (life, pool, owner, owner_uid, device, devices, started_at) "
    "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET device = excluded.device WHERE device = ''"
)
_CLOSING = 0  # the entry of what the pool had no time to report
_THROWN_AWAY = (  # a later attempt began at or before the checkpoint that this use came after
    "(u.attempt > 0 AND EXISTS (SELECT 1 FROM uses v WHERE v.run = u.run AND v.gone = 0 "
    "AND v.attempt > u.attempt AND v.step <= u.step))"
)
_WASTED = f"(CASE WHEN u.gone THEN u.wasted ELSE {_THROWN_AWAY} END)"


class Person(Struct, frozen=True):
    """A user."""

    name: str
    uid: int


class BillRow(BillLine, frozen=True, kw_only=True):
    """A line of a bill, of one kind of device; it has no cost yet, and its `disk` was not measured."""

    device: str = ""


def take_in(store: Store, report: Uses, owner: Person, *, strange: bool = False) -> None:
    """Keep what a pool reported.

    owner: the owner of the pool, who also gets the use of unknown runs.
    strange: the owner may have written the report; it is believed only about their own runs.
    """
    with store.write() as connection:
        _begin(connection, report, owner)
        for use in report.uses:
            _put(store, connection, report.life, use, owner, strange=strange)


def is_closed(store: Rows, life: str) -> bool:
    """Check whether everything that a life of a pool reported was taken in."""
    return store.row("SELECT 1 FROM lives WHERE life = ? AND ended_at IS NOT NULL", (life,)) is not None


def close(store: Store, life: str, ended_at: float | None) -> None:
    """Note the end of a life of a pool. Time that it did not report was nobody's.

    ended_at: Unix time; None where it is unknown, which means the time up to which it reported.

    Raises ValueError for an unknown life.
    """
    with store.write() as connection:
        row = store.row("SELECT * FROM lives WHERE life = ?", (life,))
        if row is None:
            raise ValueError(f"no life {life}")
        seconds = _reported(store, life) / row["devices"]
        ended = max(row["started_at"] + seconds, ended_at or 0.0)
        _put_rest(store, connection, life, ended)
        connection.execute("UPDATE lives SET ended_at = ? WHERE life = ?", (ended, life))


def keep_silence(store: Store, silent: Uses, owner: Person, until: float) -> None:
    """Count the time that a life of a pool should have reported until then, and did not, as nobody's.

    silent: a report without uses, made of what is known without asking the pool.
    """
    with store.write() as connection:
        _begin(connection, silent, owner)
        has_rest = store.row("SELECT 1 FROM uses WHERE life = ? AND entry = ?", (silent.life, _CLOSING))
        if has_rest or (until - silent.since) * silent.devices > _reported(store, silent.life):
            _put_rest(store, connection, silent.life, until)


def _begin(connection: sqlite3.Connection, report: Uses, owner: Person) -> None:
    life = report.life, report.pool, owner.name, owner.uid, report.device, report.devices, report.since
    connection.execute(_BEGIN, life)


def _reported(store: Rows, life: str) -> float:
    """Add up the device-seconds that a life reported."""
    sql = f"SELECT total(held) FROM uses WHERE life = ? AND entry <> {_CLOSING}"
    ((seconds,),) = store.tuples(sql, (life,))
    return float(seconds)


def _put_rest(store: Store, connection: sqlite3.Connection, life: str, until: float) -> None:
    """Count the time of a life that was not reported, in place of an earlier count."""
    row = store.row("SELECT * FROM lives WHERE life = ?", (life,))
    assert row is not None
    left = (until - row["started_at"]) * row["devices"] - _reported(store, life)
    connection.execute("DELETE FROM uses WHERE life = ? AND entry = ?", (life, _CLOSING))
    use = Use(_CLOSING, int(until) // HOUR * HOUR, held=max(0.0, left))
    _put(store, connection, life, use, Person(row["owner"], row["owner_uid"]))


def keep_removed(store: Rows, connection: sqlite3.Connection, run: str) -> None:
    """Keep the tokens of a run that is about to be removed, and how much of its use was thrown away."""
    connection.execute(f"UPDATE uses AS u SET wasted = {_THROWN_AWAY} WHERE run = ? AND gone = 0", (run,))
    connection.execute("UPDATE uses SET gone = 1 WHERE run = ?", (run,))
    sql = (
        "INSERT OR REPLACE INTO uses (life, entry, owner, owner_uid, sweep, hour, run, attempt, step, alias, "
        "sampled, trained, gone, wasted) SELECT 'removed:' || r.first_event, "
        "row_number() OVER (ORDER BY t.hour, t.attempt, t.lineage), r.owner, r.owner_uid, "
        "coalesce(r.sweep, ''), t.hour, t.run, t.attempt, 0, '', t.sampled, t.trained, 1, 1 - t.lineage "
        "FROM step_tokens t JOIN runs r ON r.name = t.run WHERE t.run = ?"
    )
    connection.execute(sql, (run,))


def bill(
    store: Rows,
    by: By = "run",
    *,
    since: float | None = None,
    until: float | None = None,
    user: str | None = None,
    owner_uid: int | None = None,
) -> list[BillRow]:
    """Add up the use of the hours from `since` to before `until` (Unix times), the greatest first.

    user, owner_uid: count only the runs of this user.
    """
    first = 0 if since is None else int(since) // HOUR * HOUR
    last = 2**53 if until is None else until
    where = (
        "x.hour >= ?1 AND x.hour < ?2 AND (?3 IS NULL OR x.owner = ?3) AND (?4 IS NULL OR x.owner_uid = ?4) "
        "AND (coalesce(?3, ?4) IS NULL OR x.run <> '')"
    )
    key, owner = _KEYS[by]
    source, sampled, trained = _BY_POOLS if by in ("alias", "pool") else _BY_STEPS
    sql = (
        f"SELECT {key} AS key, {owner} AS owner, x.device, total(x.held) AS held, total(x.busy) AS busy, "
        f"total(x.held * x.wasted) AS wasted, {_sum('x.generated')} AS generated, "
        f"{_sum(sampled)} AS sampled, {_sum(trained)} AS trained, {_sum('x.served')} AS served, "
        f"{_sum(f'{sampled} * x.wasted')} AS wasted_tokens, {_sum('x.prompts')} AS prompts, "
        f"{_sum('x.cached')} AS cached, sum(x.joules) AS joules, "
        f"max(x.memory) AS memory FROM ({source}) x WHERE {where} "
        "GROUP BY 1, x.device ORDER BY held DESC, key"
    )
    return [BillRow(**row) for row in store.rows(sql, (first, last, user, owner_uid))]


def _sum(counts: str) -> str:
    """Write a sum of counts that never overflows, as SQLite's own does. It is exact up to 2 ** 53."""
    return f"CAST(min(total({counts}), 9e18) AS INTEGER)"


def decayed(hours: Hours, half_life: float, now: float) -> float:
    """Add up the device-seconds of hours, where older ones count less.

    half_life: seconds after which an hour counts half. After HALF_LIVES of them it does not count at all.
    now: Unix time.
    """
    oldest = int(now - HALF_LIVES * half_life) // HOUR * HOUR
    recent = [(hour, held) for hour, held in hours if hour >= oldest]
    return sum(held * math.pow(0.5, max(0.0, now - hour) / half_life) for hour, held in recent)


def hours_of_users(store: Rows, since: float, *, strange: bool = False) -> dict[int, Hours]:
    """Find the hours in which each user's runs held devices, from the hour of `since` on, by uid.

    strange: users may have written the reports of their pools; so idle time counts as theirs, too.
    """
    whose = "" if strange else "AND run <> '' "
    sql = (
        f"SELECT owner_uid, hour, total(held) FROM uses WHERE hour >= ? {whose}"
        "GROUP BY owner_uid, hour ORDER BY owner_uid, hour"
    )
    hours: dict[int, Hours] = {}
    for uid, hour, seconds in store.tuples(sql, (int(since) // HOUR * HOUR,)):
        hours.setdefault(uid, []).append((hour, seconds))
    return hours


def owners_of_uses(store: Rows) -> dict[int, str]:
    """Find the name of each user whose runs used devices, by uid."""
    return dict(store.tuples("SELECT owner_uid, max(owner) FROM uses WHERE run <> '' GROUP BY owner_uid"))


def _put(
    store: Rows, connection: sqlite3.Connection, life: str, use: Use, owner: Person, *, strange: bool = False
) -> None:
    """Keep one use for the owner of its run, also of a removed one, or else for the owner of the pool."""
    run = name_of_attempt(store, use.run, use.attempt) if use.run else ""
    existing = "SELECT owner, owner_uid, coalesce(sweep, ''), 0 AS gone FROM runs WHERE name = ?"
    removed = "SELECT owner, owner_uid, sweep, 1 AS gone FROM uses WHERE run = ? ORDER BY hour DESC LIMIT 1"
    rows = (store.tuples(existing, (run,)) or store.tuples(removed, (run,))) if run else []
    name, uid, sweep, gone = rows[0] if rows else (owner.name, owner.uid, "", int(run != ""))
    if rows and strange and uid != owner.uid:
        return
    values = [run if column == "run" else getattr(use, column) for column in _COLUMNS]
    connection.execute(_PUT, (life, use.entry, name, uid, sweep, gone, *values))


_USES = f"""
SELECT u.run, u.attempt, u.alias, u.hour, u.owner, u.owner_uid, u.sweep, coalesce(l.device, '') AS device,
  coalesce(l.pool, '') AS pool, u.held, u.busy, u.generated, u.served, u.prompts, u.cached, u.sampled,
  CASE WHEN l.life IS NULL THEN u.trained ELSE 0 END AS trained,
  CASE WHEN l.life IS NULL THEN 0 ELSE u.trained END AS worked, u.joules, u.memory, {_WASTED} AS wasted
FROM uses u LEFT JOIN lives l ON l.life = u.life
"""
_STEPS = """
SELECT t.run, t.attempt, '', t.hour, r.owner, r.owner_uid, coalesce(r.sweep, ''), '', '', 0, 0, 0, 0, 0, 0,
  t.sampled, t.trained, 0, NULL, 0, 1 - t.lineage
FROM step_tokens t JOIN runs r ON r.name = t.run
"""
_BY_STEPS = f"{_USES} UNION ALL {_STEPS}", "x.sampled", "x.trained"
_BY_POOLS = f"{_USES} WHERE l.life IS NOT NULL", "x.generated", "x.worked"
_ONE_OWNER = "CASE WHEN min(x.owner) = max(x.owner) THEN min(x.owner) ELSE '' END"
_KEYS: dict[By, tuple[str, str]] = {
    "run": ("x.run", _ONE_OWNER),
    "user": ("CASE WHEN x.run = '' THEN '' ELSE x.owner END", _ONE_OWNER),
    "sweep": ("CASE WHEN x.run = '' THEN '' WHEN x.sweep = '' THEN '-' ELSE x.sweep END", _ONE_OWNER),
    "alias": (
        "CASE WHEN x.run = '' THEN '' WHEN x.attempt > 0 THEN '-' WHEN x.alias = '' THEN x.run || '@' "
        "ELSE x.alias END",
        _ONE_OWNER,
    ),
    "pool": ("x.pool", _ONE_OWNER),
    "day": ("date(x.hour, 'unixepoch', 'localtime')", "''"),
}
