"""Runs as rows: which columns a list can have, keys of the spec and metrics among them, and sweeps folded."""

from collections import Counter
from collections.abc import Sequence

from lorad.cli import output
from lorad.cli.table import Column
from lorad.client.columns import COLUMNS, cell, groups_of, has_losses, leader, together, with_figures
from lorad.client.words import phase
from lorad.records.runs import Run
from lorad.text import number

USUAL = ("name", "state", "step", "reward", "eval", "version", "tok/s", "owner", "age", "why")
OF_QUEUE = ("place", "name", "owner", "priority", "age", "starts", "waiting", "behind")
_FOLDED = ("why", "waiting", "behind", "tags", "note")
_DROPS = {"reward": 1, "figure": 1, "eval": 2, "version": 4, "tok/s": 5, "owner": 6, "age": 3, "priority": 3}


def show(runs: Sequence[Run], columns: Sequence[str], *, fold: bool, usual: Sequence[str] = USUAL) -> None:
    """Print a table of runs. columns: none for the usual ones, of which a narrow terminal gets some.

    fold: a sweep is one row.
    """
    names = columns or with_figures(usual, has_losses(runs))
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


def _cell(group: Sequence[Run], column: str) -> str:
    """Sum up what the runs of a sweep have in a column: steps added, the best reward, differing values."""
    best = leader(group)
    match column:
        case "name":
            return f"{group[0].sweep} ({len(group)} runs)"
        case "state":
            endings = Counter(run.reason or phase(run) for run in group)
            return ", ".join(f"{count} {ending}" for ending, count in endings.most_common())
        case "step":
            return f"{sum(run.step for run in group)}/{sum(run.steps for run in group)}"
        case "reward":
            return number(max((run.reward for run in group if run.reward is not None), default=None))
        case "eval" | "version" | "eval_last" | "figure":
            return COLUMNS[column](best) + (f" of {best.name}" if column == "version" else "")
        case "tok/s":
            rates = [run.rates.tokens_per_second for run in group if run.state == "running"]
            return number(sum(filter(None, rates)) or None, 0)
    return together(group, column)
