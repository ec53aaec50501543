"""Choose runs by a `Selection`, sort them, and add figures of their specs and of their last steps."""

import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from lorad.errors import SpecError
from lorad.selection import Selection, is_glob
from lorad.store.db import Rows
from lorad.store.facts import RECENT
from lorad.store.rows import SUMMARY_COLUMNS, RunSummary, run_summary
from lorad.store.runs import RECENT_SECONDS

_SUMMARY = ", ".join(SUMMARY_COLUMNS)
_AGE = "coalesce(ended_at, created_at)"
_NEWEST_FIRST = "created_at DESC, rowid DESC"
# what a list can be sorted by, beside keys of the spec and metrics
_SORTED = {
    name: name
    for name in (
        *("name", "state", "reason", "step", "steps", "reward", "eval_first", "eval_last", "nll_first"),
        *("nll_last", "accuracy_last", "token_accuracy_last", "version", "owner", "pool", "priority"),
        *("attempt", "sweep", "origin", "base", "tokens_per_second", "step_seconds"),
    )
} | {
    "eval": "coalesce(eval_last, -nll_last)",
    "nll": "nll_last",
    "tok/s": "tokens_per_second",
    "age": "-created_at",
    "created": "created_at",
    "started": "started_at",
    "ended": "ended_at",
    "progress": "CAST(step AS REAL) / max(steps, 1)",
}
COLUMNS = tuple(_SORTED)
_NEWEST = 100  # runs whose metrics are named
_GLOBS = 100  # in one request: each is tried on each run
_METRIC = re.compile(r"[A-Za-z_][\w@/ :.-]{0,99}")
_LAST_STEP = """(SELECT {what} FROM steps s WHERE s.run = runs.name AND s.lineage = 1 AND s.step = runs.step
ORDER BY s.attempt DESC LIMIT 1)"""


class _Selected(Struct, frozen=True):
    """A run, and its values for the keys that were asked for; None where it has none."""

    run: RunSummary
    values: dict[str, Any]

    @property
    def owner_uid(self) -> int:
        return self.run.owner_uid


def select(
    store: Rows,
    selection: Selection,
    *,
    owner_uid: int | None = None,
    recent: bool = False,
    keys: Sequence[str] = (),
    sort: Sequence[str] = (),
    limit: int = 0,
) -> list[_Selected]:
    """Choose runs, newest first where `sort` says nothing else.

    owner_uid: the owner of the runs; None for everybody's.
    recent: leave out runs that ended over a day ago.
    keys: dotted keys of the spec, or metrics of the last step.
    sort: columns or keys, of which the first counts most; `-` before one puts the largest first, and runs
        without a value come last in any case.
    limit: how many runs at most; 0 for all.

    Raises SpecError for a word that is neither column, key nor metric.
    """
    parameters: list[Any] = []
    values = [_value(key, parameters) for key in keys]
    where = _where(selection, parameters, owner_uid, recent)
    order = [_order(word, parameters) for word in sort]
    sql = (
        f"SELECT {', '.join([*values, _SUMMARY])} FROM runs WHERE {' AND '.join(where)} "
        f"ORDER BY {', '.join([*order, _NEWEST_FIRST])} LIMIT ?"
    )
    chosen = []
    for row in store.tuples(sql, (*parameters, limit or -1)):
        decoded = (None if text is None else msgspec.json.decode(text) for text in row[: len(keys)])
        chosen.append(_Selected(run_summary(row[len(keys) :]), dict(zip(keys, decoded, strict=True))))
    return chosen


def measured(store: Rows, owner_uid: int | None = None) -> list[str]:
    """Name the metrics of the last steps of the newest runs, of one owner or of everybody."""
    sql = (
        "SELECT DISTINCT metric.key FROM (SELECT name, step FROM runs WHERE ?1 IS NULL OR owner_uid = ?1 "
        f"ORDER BY {_NEWEST_FIRST} LIMIT {_NEWEST}) run JOIN steps ON steps.run = run.name AND lineage = 1 "
        f"AND steps.step > run.step - {RECENT} JOIN json_each(steps.metrics) metric"
    )
    return [name for (name,) in store.tuples(sql, (owner_uid,))]


def _where(selection: Selection, parameters: list[Any], owner_uid: int | None, recent: bool) -> list[str]:
    """Write the conditions, and append their values to `parameters`."""
    now = time.time()
    conditions = ["1"]
    for column, globs in (("name", selection.names), ("owner", selection.owner), ("sweep", selection.sweep)):
        if globs:
            conditions.append(_any_of(column, globs, parameters))
    if selection.tag:
        fits = _any_of("tag.value", selection.tag, parameters)
        conditions.append(f"EXISTS (SELECT 1 FROM json_each(runs.tags) tag WHERE {fits})")
    if selection.base:
        tails = [f"*/{base}" for base in selection.base]
        conditions.append(_any_of("base", [*selection.base, *tails], parameters))
    if selection.state:
        marks = ", ".join("?" for _ in selection.state)
        is_pausing = "state = 'stopping' AND wanted = 'pause' AND ?"
        conditions.append(f"(state IN ({marks}) OR reason IN ({marks}) OR {is_pausing})")
        parameters += [*selection.state, *selection.state, "pausing" in selection.state]
    if owner_uid is not None:
        conditions.append("owner_uid = ?")
        parameters.append(owner_uid)
    times = {">=": selection.newer, "<=": selection.older}
    for sign, seconds in times.items():
        if seconds is not None:
            conditions.append(f"{_AGE} {sign} ?")
            parameters.append(now - seconds)
    if recent:
        conditions.append("(ended_at IS NULL OR ended_at >= ?)")
        parameters.append(now - RECENT_SECONDS)
    return conditions


def _any_of(column: str, globs: Sequence[str], parameters: list[Any]) -> str:
    """Write that a column is one of the texts or fits one of the globs."""
    exact = [glob for glob in globs if not is_glob(glob)]
    loose = [glob.replace("[!", "[^") for glob in globs if is_glob(glob)]
    if len(loose) > _GLOBS:
        hint = f"Give at most {_GLOBS}, or names without *, ? and [."
        raise SpecError(f"{len(loose)} globs are too many for one request", hint=hint)
    parameters += [msgspec.json.encode(texts).decode() for texts in (exact, loose)]
    fits = f"EXISTS (SELECT 1 FROM json_each(?) glob WHERE {column} GLOB glob.value)"
    return f"({column} IN (SELECT value FROM json_each(?)) OR {fits})"


def _path(key: str) -> str:
    """Write a dotted key as a path of SQLite's. Raises SpecError."""
    if '"' in key or not all(key.split(".")):
        raise SpecError(f"{key} is no key of a spec", hint="Write keys with dots: trainer.lr.")
    return "$" + "".join(f'."{part}"' for part in key.split("."))


def _value(key: str, parameters: list[Any]) -> str:
    """Write the value of a key of the spec or of a metric as JSON text."""
    if not is_of_spec(key):
        parameters.append(_metric_path(key))
        return _LAST_STEP.format(what="json_quote(json_extract(s.metrics, ?))")
    parameters.append(_path(key))
    return (
        "CASE json_type(runs.spec, ?) WHEN 'true' THEN 'true' WHEN 'false' THEN 'false' "
        f"ELSE json_quote({_of_spec(key, parameters)}) END"
    )


def _of_spec(key: str, parameters: list[Any]) -> str:
    """Write the value of a key of the spec; `reward.name` is also the text that stands for the section."""
    parameters.append(_path(key))
    section, _, last = key.rpartition(".")
    if last != "name" or not section:
        return "json_extract(runs.spec, ?)"
    parameters += [_path(section)] * 2
    short = "CASE json_type(runs.spec, ?) WHEN 'text' THEN json_extract(runs.spec, ?) END"
    return f"coalesce(json_extract(runs.spec, ?), {short})"


def _order(word: str, parameters: list[Any]) -> str:
    """Write what a column, a key of the spec or a metric is sorted by; runs without it come last."""
    key = word.removeprefix("-")
    direction = "DESC" if word.startswith("-") else "ASC"
    if (what := _SORTED.get(key)) is None:
        if is_of_spec(key):
            what = _of_spec(key, parameters)
        else:
            what = _LAST_STEP.format(what="json_extract(s.metrics, ?)")
            parameters.append(_metric_path(key))
    return f"{what} {direction} NULLS LAST"


def is_of_spec(key: str) -> bool:
    """Check whether a word names a key of the spec and not a metric: it has a dot or is no section."""
    return "." in key or key in ("seed", "deterministic")


def _metric_path(key: str) -> str:
    """Write the name of a metric as a path of SQLite's. Raises SpecError for what can be none."""
    if not _METRIC.fullmatch(key):
        raise SpecError(f"{key!r} is no column", hint=f"Columns are {', '.join(COLUMNS)}.")
    return f'$."{key}"'
