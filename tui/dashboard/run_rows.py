"""A run as a row of the table: its cells, and what it is ordered by."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from rich.text import Text

from lorad.alarms import Alarm
from lorad.client.shapes import Run
from lorad.client.words import evals_in_words, why
from lorad.text import coarse_age, number, one_line
from lorad.tui.dashboard.snapshot import rate
from lorad.tui.widgets.columns import Column, Values
from lorad.tui.widgets.sparkline import sparkline

_Cells = dict[str, Text]
_T = TypeVar("_T")
# How a state looks besides its colour.
_SIGNS = {
    "queued": ("◌", "cyan"),
    "starting": ("◐", "cyan"),
    "running": ("●", "green"),
    "stopping": ("◑", "yellow"),
    "paused": ("‖", "yellow"),
    "completed": ("✔", "blue"),
    "stopped": ("■", "blue"),
    "killed": ("✖", "magenta"),
    "imported": ("⇣", "blue"),
}
LEVELS = {"bad": ("!!", "bold red"), "look": ("!", "yellow")}  # of an alarm
_BAD = ("✖", "bold red")  # failed, lost, attestation_failed, and whatever else may come
_STYLES = {"done": "cyan", "recent": "green"}
_NOT_YOURS = "⊘"
_LONGEST = 80  # characters of a name that are looked at: no column is wider

COLUMNS = (
    Column("name", 8, 40, 0, orders=True, shrinks=16),
    Column("state", 10, 23, 0, orders=True, shrinks=12),
    Column("step", 5, 15, 2, right=True),
    Column("done", 6, 6, 6, orders=True),
    Column("reward", 6, 8, 3, right=True, orders=True),
    Column("recent", 8, 24, 4),
    Column("eval", 11, 15, 11),
    Column("tok/s", 6, 8, 5, right=True, orders=True),
    Column("version", 7, 8, 9),
    Column("owner", 5, 14, 8, orders=True),
    Column("age", 4, 5, 7, right=True, orders=True),
    Column("why", 14, 60, 10, rest=True),
)


class Lazy(Mapping[str, _T], Generic[_T]):
    """Something about runs, made when it is asked for."""

    def __init__(self, runs: Mapping[str, Run], make: Callable[[Run], _T]) -> None:
        self._runs, self._make = runs, make

    def __getitem__(self, name: str) -> _T:
        return self._make(self._runs[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)


class CellMaker:
    """Cells of runs: the same ones as before as long as the run is the same one, and as old. width: of
    `recent`.
    """

    def __init__(self) -> None:
        self.width = 8
        self.may_act: Callable[[str | None], bool] = lambda owner: True
        self.alarms: Mapping[str, Sequence[Alarm]] = {}  # by run
        self._made: dict[str, tuple[Run, Any, _Cells]] = {}

    def cells(self, run: Run) -> _Cells:
        may_act, level = self.may_act(run.owner), self._level(run.name)
        depends = coarse_age(run.created_at), self.width, may_act, level
        known = self._made.get(run.name)
        if known is not None and known[0] is run and known[1] == depends:
            return known[2]
        made = cells(run, width=self.width, is_yours=may_act)
        if level and run.state != "ended":
            made["state"].append(f" {LEVELS[level][0]}", LEVELS[level][1])
        self._made[run.name] = run, depends, made
        return made

    def _level(self, name: str) -> str:
        """Return the level of the run's worst alarm."""
        return min((alarm.level for alarm in self.alarms.get(name, ())), default="")

    def forget(self, names: Mapping[str, Any]) -> None:
        """All but these."""
        for name in self._made.keys() - names.keys():
            del self._made[name]


def state_text(run: Run) -> Text:
    """Return a sign and a word for the state; an ended run shows its reason."""
    word = run.reason or run.state if run.state == "ended" else run.state
    sign, style = _SIGNS.get(word, _BAD)
    return Text(f"{sign} {one_line(word).replace('_', ' ')}", style=style, no_wrap=True, overflow="ellipsis")


def bar(part: float, width: int) -> str:
    """0.5 -> ████░░░░"""
    eighths = round(min(max(part, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + " ▏▎▍▌▋▊▉"[rest] * (rest > 0)).ljust(width, "░")


def share(run: Run) -> float:
    return run.step / run.steps if run.steps else 0.0


def _total(steps: int | None) -> str:
    """2000000 -> 2M"""
    for unit, name in ((10**6, "M"), (1000, "k")):
        if steps and steps >= 10**5 and steps % unit == 0:
            return f"{steps // unit}{name}"
    return str(steps or "?")


def eval_text(run: Run) -> str:
    return evals_in_words(run, "→")


def _owner_text(run: Run, *, is_yours: bool) -> Text:
    """Return the owner, with a sign where the run may only be looked at."""
    name = one_line(run.owner[:_LONGEST])
    return (
        cell(name)
        if is_yours
        else Text(f"{_NOT_YOURS} {name}", style="dim", no_wrap=True, overflow="ellipsis")
    )


def cells(run: Run, *, width: int = 8, is_yours: bool = True) -> _Cells:
    """The text of every column. width: of the line of recent rewards."""
    plain = {
        "name": run.name[:_LONGEST],
        "step": f"{run.step}/{_total(run.steps)}",
        "done": bar(share(run), 6),
        "reward": number(run.reward),
        "recent": sparkline(run.recent, width),
        "eval": eval_text(run),
        "tok/s": number(rate(run), 0),
        "version": "" if run.version is None else f"@{run.version}",
        "age": coarse_age(run.created_at),
        "why": why(run)[:400],
    }
    row = {key: cell(one_line(value), _STYLES.get(key, "")) for key, value in plain.items()}
    return {**row, "state": state_text(run), "owner": _owner_text(run, is_yours=is_yours)}


def cell(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def values(run: Run) -> Values:
    """Return the values that columns are ordered by."""
    return {
        "name": run.name,
        "state": run.reason or run.state,
        "done": share(run),
        "reward": run.reward,
        "tok/s": rate(run),
        "owner": run.owner,
        "age": -run.created_at,
    }
