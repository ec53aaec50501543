"""The columns that `lorad list` and the dashboard can show of runs, and how a sweep shows as one row."""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from lorad.client import words
from lorad.records.pools import Pool
from lorad.records.runs import Run
from lorad.text import age, duration, number

_FEW = 3  # values of a sweep that are shown one by one
_RECENT = 5  # rewards
_KEY = re.compile(r"[A-Za-z_][\w@/ :-]*(\.[\w@/ :-]+)*")
_LONGEST = 100  # characters of a key
NOTHING = "-"
"""What a list shows of a key that a run has no value for."""
FILLED = ("device", "cost")
"""Columns that `filled` finds in other answers than the list of runs."""


def seconds_left(run: Run) -> float | None:
    """Estimate how long a run still takes.

    The time since its last step counts, up to what a step usually takes. None where it does not run, has made
    no step, or ends when a client decides.
    """
    step_seconds = run.rates.step_seconds
    if run.state != "running" or step_seconds is None or run.signals.on_request or not run.steps:
        return None
    steps = max(run.steps - run.step, 0)
    since = 0.0 if run.signals.at is None or not steps else max(time.time() - run.signals.at, 0.0)
    return steps * step_seconds - min(since, step_seconds)


def amount(cost: float) -> str:
    """Write an amount of money without its currency."""
    return "<0.01" if 0 < cost < 0.01 else f"{cost:.2f}"


COLUMNS: dict[str, Callable[[Run], str]] = {
    "name": lambda run: run.name,
    "state": lambda run: words.phase(run) + (f": {run.reason}" if run.reason else ""),
    "step": words.steps_in_words,
    "steps": lambda run: str(run.steps or ""),
    "progress": lambda run: f"{words.share(run):.0%}" if run.steps else "",
    "reward": lambda run: number(run.reward),
    "figure": words.figure_in_words,
    "recent": lambda run: " ".join(number(reward, 2) or "-" for reward in run.recent[-_RECENT:]),
    "eval": words.evals_in_words,
    "eval_first": lambda run: number(run.eval_first),
    "eval_last": lambda run: number(run.eval_last),
    "nll": lambda run: number(run.nll_last),
    "version": lambda run: "" if run.version is None else f"@{run.version}",
    "tok/s": lambda run: number(run.rates.tokens_per_second, 0) if run.state == "running" else "",
    "step_seconds": lambda run: number(run.rates.step_seconds, 2),
    "eta": lambda run: "" if (left := seconds_left(run)) is None else duration(left),
    "took": lambda run: duration((run.ended_at or time.time()) - run.started_at) if run.started_at else "",
    "owner": lambda run: run.owner,
    "age": lambda run: age(run.created_at),
    "ended": lambda run: age(run.ended_at),
    "sweep": lambda run: run.sweep or "",
    "group": lambda run: run.group,
    "tags": lambda run: " ".join(run.tags),
    "note": lambda run: run.note,
    "base": lambda run: run.base,
    "pool": lambda run: run.pool or "",
    "device": lambda run: run.values.get("device", ""),
    "cost": lambda run: "" if run.values.get("cost") is None else amount(run.values["cost"]),
    "priority": lambda run: str(run.priority),
    "attempt": lambda run: str(run.attempt),
    "origin": lambda run: run.origin or "",
    "reason": lambda run: run.reason or "",
    "place": lambda run: "" if run.queue is None else str(run.queue.place),
    "behind": lambda run: "" if run.queue is None else run.queue.behind,
    "starts": words.starts_in_words,
    "why": words.why,
    "waiting": lambda run: run.waiting,
}


def has_losses(runs: Iterable[Run]) -> bool:
    """Check whether any of the runs has a loss and no reward."""
    return any(map(words.judged_by_loss, runs))


def with_figures(columns: Sequence[str], has_losses: bool) -> list[str]:
    """Show `figure`, which is named in each row, instead of `reward` where some run has a loss."""
    return ["figure" if has_losses and name == "reward" else name for name in columns]


def is_key(name: str) -> bool:
    """Check whether the daemon would take a name as a key of the spec or a metric."""
    return len(name) <= _LONGEST and _KEY.fullmatch(name) is not None


def cell(run: Run, column: str) -> str:
    """Return what a run has in a column: one of COLUMNS, or a key that the daemon was asked for."""
    if column in COLUMNS:
        return COLUMNS[column](run)
    return in_words(run.values[column]) if run.values.get(column) is not None else NOTHING


def in_words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def devices_of(pools: Sequence[Pool]) -> dict[str, str]:
    """Name the devices of each run that has a slot in a pool."""
    return {run: " ".join(pool.devices or [pool.device]) for pool in pools for run in pool.tenants}


def filled(run: Run, devices: Mapping[str, str], costs: Mapping[str, float]) -> Run:
    """Give a run the values of FILLED, as far as there are any."""
    values = {"device": devices.get(run.name), "cost": costs.get(run.name)}
    values = {name: value for name, value in values.items() if value is not None}
    return replace(run, values=run.values | values) if values else run


# -- a sweep as one row --------------------------------------------------------------------------------------


def groups_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Group the runs of each sweep, where its first one stood. A run without a sweep is a group alone."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault(("sweep", run.sweep) if run.sweep else ("run", run.name), []).append(run)
    return [*groups.values()]


def leader(group: Sequence[Run]) -> Run:
    """Choose the run with the best last evaluation, else reward or loss; of equal ones, the furthest."""

    def rank(run: Run) -> tuple[float, int]:
        nll, loss = (None if value is None else -value for value in (run.nll_last, run.signals.loss))
        figures = (run.eval_last, nll, run.reward, loss)
        merit = next((figure for figure in figures if figure is not None), math.nan)
        return -math.inf if math.isnan(merit) else merit, run.step

    return max(group, key=rank)


def together(group: Sequence[Run], column: str) -> str:
    """Sum up a column of several runs: a few values one by one, many numbers as a range, else their count."""
    values = [run.values[column] for run in group if run.values.get(column) is not None]
    cells = dict.fromkeys(cell(run, column) for run in group)
    different = [text for text in cells if text not in ("", NOTHING)] or [*cells]
    if len(different) <= _FEW:
        return ", ".join(different)
    if values and all(isinstance(value, int | float) for value in values):
        return f"{in_words(min(values))}..{in_words(max(values))}"
    return f"{len(different)} values"
