"""Runs as rows: which columns a list can have, keys of the spec and metrics among them, and sweeps folded."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lorad.cli import output
from lorad.cli.table import Column
from lorad.client.shapes import Run
from lorad.client.words import evals_in_words, starts_in_words, why
from lorad.text import age, duration, number

Cell = Callable[[Run], str]
_FEW = 3  # values of a sweep that are shown one by one


def _state(run: Run) -> str:
    return run.state + (f": {run.reason}" if run.reason else "")


def _took(run: Run) -> str:
    """Say how long the run has worked, or did."""
    if run.started_at is None:
        return ""
    return age(run.started_at) if run.ended_at is None else duration(run.ended_at - run.started_at)


def _left(run: Run) -> str:
    if run.state != "running" or run.rates.step_seconds is None:
        return ""
    return duration((run.steps - run.step) * run.rates.step_seconds)


USUAL = ("name", "state", "step", "reward", "eval", "version", "tok/s", "owner", "age", "why")
OF_QUEUE = ("place", "name", "owner", "priority", "age", "starts", "waiting", "behind")
COLUMNS: dict[str, Cell] = {
    "name": lambda run: run.name,
    "state": _state,
    "step": lambda run: f"{run.step}/{run.steps}",
    "steps": lambda run: str(run.steps),
    "progress": lambda run: f"{run.step / max(run.steps, 1):.0%}",
    "reward": lambda run: number(run.reward),
    "eval": evals_in_words,
    "eval_first": lambda run: number(run.eval_first),
    "eval_last": lambda run: number(run.eval_last),
    "nll": lambda run: number(run.nll_last),
    "version": lambda run: "" if run.version is None else f"@{run.version}",
    "tok/s": lambda run: number(run.rates.tokens_per_second, 0) if run.state == "running" else "",
    "step_seconds": lambda run: number(run.rates.step_seconds, 2),
    "eta": _left,
    "took": _took,
    "owner": lambda run: run.owner,
    "age": lambda run: age(run.created_at),
    "ended": lambda run: age(run.ended_at),
    "sweep": lambda run: run.sweep or "",
    "group": lambda run: run.group,
    "tags": lambda run: " ".join(run.tags),
    "note": lambda run: run.note,
    "base": lambda run: run.base,
    "pool": lambda run: run.pool or "",
    "priority": lambda run: str(run.priority),
    "attempt": lambda run: str(run.attempt),
    "origin": lambda run: run.origin or "",
    "reason": lambda run: run.reason or "",
    "place": lambda run: "" if run.queue is None else str(run.queue.place),
    "behind": lambda run: "" if run.queue is None else run.queue.behind,
    "starts": lambda run: starts_in_words(run).removeprefix("starts "),
    "why": why,
    "waiting": lambda run: run.waiting,
}
_FOLDED = ("why", "waiting", "behind", "tags", "note")
_DROPS = {"reward": 1, "eval": 3, "version": 4, "tok/s": 5, "owner": 6, "age": 2, "priority": 3}


def show(runs: Sequence[Run], columns: Sequence[str], *, fold: bool, usual: Sequence[str] = USUAL) -> None:
    """Print a table of runs. columns: none for the usual ones, of which a narrow terminal gets some.

    fold: a sweep is one row.
    """
    names = columns or usual
    heads = [
        Column(name, kind="fold") if name in _FOLDED else Column(name, 0 if columns else _DROPS.get(name, 0))
        for name in names
    ]
    groups = groups_of(runs) if fold else [[run] for run in runs]
    rows = [
        [_cell(group, name) if fold and group[0].sweep else cell(group[0], name) for name in names]
        for group in groups
    ]
    output.print_table(heads, rows, empty=output.NO_RUNS)


def run_row(run: Run) -> tuple[str, ...]:
    """Return the usual columns of a run."""
    return tuple(COLUMNS[name](run) for name in USUAL)


def groups_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Put the runs of a sweep together, where its first one stood; a run of no sweep is alone."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        found.setdefault(("sweep", run.sweep) if run.sweep else ("run", run.name), []).append(run)
    return [*found.values()]


def cell(run: Run, column: str) -> str:
    """Return what a run has in a column: one of COLUMNS, or a key that the daemon was asked for."""
    return COLUMNS[column](run) if column in COLUMNS else _in_words(run.values.get(column))


def _in_words(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cell(group: Sequence[Run], column: str) -> str:
    """Return what the runs of a sweep have together: the sum of their steps, the best reward, the values that
    differ.
    """
    best = max(group, key=lambda run: (run.eval_last or run.reward or float("-inf"), run.step))
    match column:
        case "name":
            return f"{group[0].sweep} ({len(group)} runs)"
        case "state":
            return ", ".join(f"{n} {state}" for state, n in Counter(map(_ending, group)).most_common())
        case "step":
            return f"{sum(run.step for run in group)}/{sum(run.steps for run in group)}"
        case "reward":
            return number(max((run.reward for run in group if run.reward is not None), default=None))
        case "eval" | "version" | "eval_last":
            return COLUMNS[column](best) + (f" of {best.name}" if column == "version" else "")
        case "tok/s":
            rates = [run.rates.tokens_per_second for run in group if run.state == "running"]
            return number(sum(filter(None, rates)) or None, 0)
    return _together(group, column)


def _ending(run: Run) -> str:
    return run.reason or run.state


def _together(group: Sequence[Run], column: str) -> str:
    """Return each of a few values of a column, the least and the largest of many numbers, else how many."""
    values = [run.values[column] for run in group if run.values.get(column) is not None]
    different = [*dict.fromkeys(filter(None, (cell(run, column) for run in group)))]
    if len(different) <= _FEW:
        return ", ".join(different)
    if values and all(isinstance(value, int | float) for value in values):
        return f"{_in_words(min(values))}..{_in_words(max(values))}"
    return f"{len(different)} values"
