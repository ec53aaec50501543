"""A sweep as one row of the table of runs: how many runs do what, the best figures, and who leads."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from lorad.client.columns import amount, groups_of, leader, seconds_left, together
from lorad.client.words import evals_in_words, figure_in_words, phase
from lorad.records.runs import Run
from lorad.text import coarse_age, duration, number, one_line
from lorad.tui.dashboard.run_rows import BAD, LEVELS, SIGNS, CellMaker, bar, total_steps, values
from lorad.tui.dashboard.snapshot import rate
from lorad.tui.widgets.columns import Cells, Values

_PREFIX = "sweep:"  # of the key of its row: no run is called so
_OPEN = "▾"
_FOLDED = "▸"
Groups = dict[str, list[Run]]  # by key of a row: the one run, or those of a sweep


def sweep_of(key: str | None) -> str | None:
    """Return the sweep that a row stands for, or None."""
    return key.removeprefix(_PREFIX) if key and key.startswith(_PREFIX) else None


def key_of(sweep: str) -> str:
    return f"{_PREFIX}{sweep}"


def folded(runs: Iterable[Run], opened: Collection[str]) -> tuple[Groups, dict[str, str]]:
    """Return the rows, each with its runs, and the row of the sweep that each run of an opened one is below.

    A sweep of which one run alone is shown is that run.
    """
    rows: Groups = {}
    parents: dict[str, str] = {}
    for group in groups_of([*runs]):
        sweep = group[0].sweep
        if sweep is None or len(group) == 1:
            rows[group[0].name] = group
            continue
        rows[key_of(sweep)] = group
        if sweep in opened:
            rows |= {run.name: [run] for run in group}
            parents |= {run.name: key_of(sweep) for run in group}
    return rows, parents


@dataclass(eq=False)
class SweepMaker:
    """Makes cells of sweeps, the same ones as before as long as nothing of them changed."""

    _runs: CellMaker
    _last_made: dict[str, tuple[list[Run], object, Cells]] = field(default_factory=dict)

    def cells(self, group: list[Run], *, is_open: bool) -> Cells:
        """Make the cells of a sweep: what its leader has, but for its name, its states and its sums."""
        sweep = group[0].sweep or ""
        maker = self._runs
        more = [(maker.devices.get(run.name), maker.costs.get(run.name)) for run in group]
        age = coarse_age(_first(group))
        level = maker.level(group)
        depends = is_open, maker.columns, maker.width, maker.scale, maker.has_losses, age, level, more
        before = self._last_made.get(sweep)
        if before is not None and before[0] == group and before[1] == depends:
            return before[2]
        runs = [maker.filled(run) for run in group]
        best = leader(runs)
        row = maker.plain(best)
        quiet = "dim" if all(run.state == "ended" for run in runs) else ""
        for name in maker.columns:
            text = _together(runs, name, best, is_open=is_open)
            if text is not None:
                row[name] = Text(one_line(text), quiet or ("cyan" if name == "progress" else ""))
        if "state" in row:  # each state's sign and how many runs are in it: ●3 ◌2 ✔3
            counts = Counter(run.reason or phase(run) for run in runs)
            words = [word for word in SIGNS if word in counts]
            words += sorted(word for word in counts if word not in SIGNS)
            signs = [(SIGNS.get(word, BAD), counts[word]) for word in words]
            texts = [Text(f"{sign}{count}", style=style) for (sign, style), count in signs]
            row["state"] = Text(" ").join(texts)
        if level:
            row["state" if "state" in row else "name"].append(f" {LEVELS[level][0]}", LEVELS[level][1])
        self._last_made[sweep] = group, depends, row
        return row


def _together(group: Sequence[Run], column: str, best: Run, *, is_open: bool) -> str | None:
    """Say what the runs have in a column; None where it is what the leader has."""
    steps = sum(run.step for run in group)
    total = sum(run.steps for run in group)
    match column:
        case "name":
            return f"{_OPEN if is_open else _FOLDED} {best.sweep} ({len(group)})"
        case "step":
            return f"{steps}/{total_steps(total)}"
        case "steps":
            return total_steps(total)
        case "progress":
            return bar(steps / total if total else 0.0, 8)
        case "tok/s":
            return number(sum(rate(run) or 0.0 for run in group) or None, 0)
        case "eta":
            left = [seconds for run in group if (seconds := seconds_left(run)) is not None]
            return duration(max(left)) if left else ""
        case "age":
            return coarse_age(_first(group))
        case "why":
            return f"{best.name} leads"
        case "cost":
            costs = [run.values["cost"] for run in group if "cost" in run.values]
            return amount(sum(costs)) if costs else ""
        case (
            "state" | "reward" | "figure" | "recent" | "eval" | "eval_first" | "eval_last" | "nll" | "version"
        ):
            return None
    return together(group, column)


def _first(group: Sequence[Run]) -> float:
    return min(run.created_at for run in group)


def sweep_values(group: Sequence[Run], columns: Iterable[str]) -> Values:
    """Return what a sweep is ordered by: what its leader has, but for its name and its sums."""
    best = leader(group)
    ordered_by = dict(values(best, columns))
    steps = sum(run.step for run in group)
    total = sum(run.steps for run in group)
    costs = [run.values["cost"] for run in group if "cost" in run.values]
    sums: Mapping[str, str | float | None] = {
        "name": best.sweep,
        "step": steps,
        "steps": total,
        "progress": steps / total if total else 0.0,
        "tok/s": sum(rate(run) or 0.0 for run in group) or None,
        "age": -_first(group),
        "cost": sum(costs) if costs else None,
    }
    return ordered_by | {name: value for name, value in sums.items() if name in ordered_by}


def in_words(group: Sequence[Run]) -> str:
    """Describe a sweep in a line: how many runs do what, who leads and by what."""
    best = leader(group)
    counts = Counter((run.reason or phase(run)).replace("_", " ") for run in group)
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    evals = evals_in_words(best, "→")
    figure = f"eval {evals}" if evals else figure_in_words(best)
    leads = f" · {best.name} leads: {figure}" if figure else ""
    return f"sweep {best.sweep}: {states}{leads} · enter opens it, f folds it"
