"""A run as a row of the table: its cells, and what it is ordered by."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rich.text import Text

from lorad.alarms import Alarm
from lorad.client.columns import NOTHING, filled, seconds_left, with_figures
from lorad.client.columns import cell as client_cell
from lorad.client.words import evals_in_words, phase, share
from lorad.records.runs import Run
from lorad.text import coarse_age, one_line
from lorad.tui.dashboard.run_columns import USUAL
from lorad.tui.dashboard.snapshot import rate
from lorad.tui.widgets.columns import Cells, Value, Values
from lorad.tui.widgets.sparkline import Scale, sparkline

_T = TypeVar("_T")
# How a state looks besides its colour.
SIGNS = {
    "queued": ("◌", "cyan"),
    "starting": ("◐", "cyan"),
    "running": ("●", "green"),
    "stopping": ("◑", "yellow"),
    "pausing": ("◑", "yellow"),
    "paused": ("‖", "yellow"),
    "completed": ("✔", "blue"),
    "stopped": ("■", "blue"),
    "killed": ("✖", "magenta"),
    "imported": ("⇣", "blue"),
}
LEVELS = {"bad": ("!!", "bold red"), "look": ("!", "yellow")}  # of an alarm
BAD = ("✖", "bold red")  # failed, lost, attestation_failed, and whatever else may come
_STYLES = {"progress": "cyan", "recent": "green"}
_NOT_YOURS = "⊘"
_LONGEST = 80  # characters of a name that are looked at: no column is wider


@dataclass(eq=False)
class Lazy(Mapping[str, _T], Generic[_T]):
    """Something about rows, which `_make` makes from the key of a row when it is asked for."""

    _rows: Mapping[str, Any]
    _make: Callable[[str], _T]

    def __getitem__(self, key: str) -> _T:
        return self._make(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows


@dataclass(eq=False)
class CellMaker:
    """Makes cells of runs: the same ones as before as long as the run is the same one, and as old.

    Attributes:
        columns: The names of the columns.
        width: How many cells `recent` has.
        scale: The least and the largest reward that `recent` shows.
        has_losses: A run of the table has a loss in the place of a reward, so that each figure has its name.
    """

    columns: tuple[str, ...] = USUAL
    width: int = 8
    scale: Scale | None = None
    has_losses: bool = False
    may_act: Callable[[str | None], bool] = lambda owner: True
    alarms: Mapping[str, Sequence[Alarm]] = field(default_factory=dict)  # by run
    devices: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    _last_made: dict[str, tuple[Run, Any, Cells]] = field(default_factory=dict)

    def cells(self, run: Run, *, is_member: bool = False) -> Cells:
        """Make the cells of a run. is_member: the run stands below the row of its sweep."""
        may_act = self.may_act(run.owner)
        level = self.level([run])
        more = self.devices.get(run.name), self.costs.get(run.name)
        looks = self.columns, self.width, self.scale, self.has_losses
        depends = coarse_age(run.created_at), looks, more, may_act, level, is_member
        before = self._last_made.get(run.name)
        if before is not None and before[0] is run and before[1] == depends:
            return before[2]
        row = self.plain(self.filled(run), is_yours=may_act)
        if level and run.state != "ended":
            row["state" if "state" in row else "name"].append(f" {LEVELS[level][0]}", LEVELS[level][1])
        if is_member:
            row["name"] = Text("└ ", "dim").append_text(row["name"])
        self._last_made[run.name] = run, depends, row
        return row

    def plain(self, run: Run, *, is_yours: bool = True) -> Cells:
        """Make the cells without what its alarms and its sweep add."""
        names = with_figures(self.columns, self.has_losses)
        row = cells(run, columns=names, width=self.width, scale=self.scale, is_yours=is_yours)
        return {column: row[name] for column, name in zip(self.columns, names, strict=True)}

    def filled(self, run: Run) -> Run:
        return filled(run, self.devices, self.costs)

    def level(self, runs: Iterable[Run]) -> str:
        """Return the level of the worst alarm of these runs."""
        return min((alarm.level for run in runs for alarm in self.alarms.get(run.name, ())), default="")

    def forget(self, names: Mapping[str, Any]) -> None:
        """Forget the cells of all runs but these."""
        for name in self._last_made.keys() - names.keys():
            del self._last_made[name]


def state_text(run: Run) -> Text:
    """Return a sign and a word for the state; an ended run shows its reason."""
    word = run.reason or phase(run)
    sign, style = SIGNS.get(word, BAD)
    return Text(f"{sign} {one_line(word).replace('_', ' ')}", style)


def bar(part: float, width: int) -> str:
    """Draw a part of a whole: 0.5 becomes ████░░░░."""
    eighths = round(min(max(part, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + " ▏▎▍▌▋▊▉"[rest] * (rest > 0)).ljust(width, "░")


def total_steps(steps: int | None) -> str:
    """Write a number of steps in few characters: 2000000 becomes 2M."""
    for unit, name in ((10**6, "M"), (1000, "k")):
        if steps and steps >= 10**5 and steps % unit == 0:
            return f"{steps // unit}{name}"
    return str(steps or "?")


def cells(
    run: Run,
    *,
    columns: Iterable[str] = USUAL,
    width: int = 8,
    scale: Scale | None = None,
    is_yours: bool = True,
) -> Cells:
    """Make the text of every column. width, scale: the cells and the ends of the line of recent rewards."""
    quiet = "dim" if run.state == "ended" else ""
    row: Cells = {}
    for name in columns:
        match name:
            case "state":
                row[name] = state_text(run)
            case "owner":
                owner = one_line(run.owner[:_LONGEST])
                row[name] = Text(owner, quiet) if is_yours else Text(f"{_NOT_YOURS} {owner}", "dim")
            case "recent":
                row[name] = Text(sparkline(run.recent, width, scale), quiet or _STYLES[name])
            case "name":
                row[name] = Text(one_line(run.name[:_LONGEST]), quiet)
            case "step":
                total = f"/{total_steps(run.steps)}" if run.steps else ""
                row[name] = Text(f"{run.step}{total}", quiet)
            case "progress":
                row[name] = Text(bar(share(run), 8) if run.steps else "", quiet or _STYLES[name])
            case "eval":
                row[name] = Text(one_line(evals_in_words(run, "→")), quiet)
            case "age":
                row[name] = Text(coarse_age(run.created_at), quiet)
            case _:
                row[name] = Text(one_line(client_cell(run, name)[:400]), quiet)
    return row


def values(run: Run, columns: Iterable[str] = USUAL) -> Values:
    """Return the values that columns are ordered by."""
    return {name: _value(run, name) for name in columns}


def _value(run: Run, name: str) -> Value:
    match name:
        case "name" | "owner" | "base" | "step" | "steps" | "reward" | "version" | "attempt" | "priority":
            field: Value = getattr(run, name)
            return field
        case "state":
            return run.reason or phase(run)
        case "progress":
            return share(run)
        case "tok/s":
            return rate(run)
        case "age":
            return -run.created_at
        case "eta":
            return seconds_left(run)
        case "took":
            return (run.ended_at or time.time()) - run.started_at if run.started_at else None
        case "ended":
            return -run.ended_at if run.ended_at else None
        case "eval":
            return run.eval_last if run.nll_last is None else -run.nll_last
    value = run.values.get(name)
    if isinstance(value, int | float):
        return value
    text = client_cell(run, name)
    head = text.partition(" ")[0].lstrip("<@")
    try:
        return None if text in ("", NOTHING) else float(head)
    except ValueError:
        return text
