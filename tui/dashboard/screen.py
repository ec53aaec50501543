"""Everything at once: runs, pools, devices, what happens, and what calls for a look."""

import shlex
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from rich.text import Text
from textual import events, work
from textual.containers import Container
from textual.widget import Widget
from textual.widgets import Input

from lorad.alarms import Alarm
from lorad.client.boxes.hosts import HERE
from lorad.client.client import Client
from lorad.client.columns import devices_of, has_losses
from lorad.client.words import why
from lorad.errors import LoradError
from lorad.records.runs import Run
from lorad.text import one_line
from lorad.tui.actions.table import bindings, opens
from lorad.tui.actions.verbs import VERBS
from lorad.tui.dashboard import filter, one_liners
from lorad.tui.dashboard.column_picker import ColumnPicker
from lorad.tui.dashboard.run_columns import remember, remembered, shaped
from lorad.tui.dashboard.run_rows import CellMaker, Lazy, values
from lorad.tui.dashboard.snapshot import Board, Snapshot, rate
from lorad.tui.dashboard.sweep_rows import (
    Groups,
    SweepMaker,
    folded,
    in_words,
    key_of,
    sweep_of,
    sweep_values,
)
from lorad.tui.dashboard.tables import Alarms, DevicesPane, Pane, PoolsPane, Ticker
from lorad.tui.feed import Changes
from lorad.tui.screens.base import Base
from lorad.tui.widgets.columns import Values
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.sparkline import Scale, span
from lorad.tui.widgets.table import Rows

_T = TypeVar("_T")
_NOTHING = Snapshot()
_ORDER = ("running", "starting", "stopping", "queued", "paused", "ended")
_SPARK = {190: 24, 140: 12, 0: 8}  # cells of recent rewards, from so many cells of width on
_WIDE = 140  # cells from which the scale of recent rewards is in the heading
# of pools and as many of devices, and of events, from so many lines on
_LINES = {32: (4, 3), 24: (2, 1), 0: (1, 1)}
_EMPTY = """No runs yet.

  lorad init               writes a spec to start from
  lorad run SPEC --detach  starts it; it appears here
  n                        starts one from here

a shows runs that ended days ago."""


class Dashboard(Base):
    BINDINGS = bindings("run", "board", "pool")
    AUTO_FOCUS = ""

    def __init__(self) -> None:
        super().__init__()
        self._news = _NOTHING
        self._counts = Counter[str]()  # of the runs by state
        self._pace = 0.0  # tokens per second of all runs
        self._runs: dict[str, Run] = {}
        self._alarms: dict[str, list[Alarm]] = {}  # by run
        self._maker = CellMaker()
        self._sweeps = SweepMaker(self._maker)
        self._rows: Groups = {}
        self._opened: set[str] = set()  # sweeps whose runs are listed
        self._spans: dict[str, tuple[Run, Scale | None]] = {}  # of the recent rewards of runs
        self._filter = Input(id="filter", placeholder=filter.HINT, compact=True, select_on_focus=False)

    def body(self) -> Iterable[Widget]:
        # the feed's thread's from here on, but for `all`
        self.board = Board(self.lorad.config.alarms, self.lorad.acknowledged, self.lorad.box or HERE)
        yield Line(id="alarmed")
        columns, self._notice = remembered()
        self.board.columns = self._maker.columns = tuple(columns)
        self.table = Rows(shaped(columns), id="runs", marks_missing=True)
        self.table.add_class("-none")
        yield self.table
        yield Line(id="empty")
        yield Line(id="why")
        yield self._filter
        with Container(id="brief"):
            yield Line(id="pools-lines")
            yield Line(id="devices-lines")
            yield Line(id="events-lines")
        with Container(id="upper", classes="panes"):
            yield PoolsPane()
            yield DevicesPane()
        with Container(id="lower", classes="panes"):
            yield Alarms()
            yield Ticker()

    def on_mount(self) -> None:
        if self._notice:
            self.notify(self._notice, severity="warning", timeout=15, markup=False)

    # -- what is read and shown ------------------------------------------------------------------------------
    def read(self, client: Client, changes: Changes) -> Snapshot | None:
        return self.board.read(client, changes)

    def show(self, data: Snapshot) -> None:
        self._news = data
        self._counts = Counter(run.state for run in data.runs)
        self._pace = sum(rate(run) or 0.0 for run in data.runs)
        self._runs = {run.name: run for run in data.runs}
        self._alarms = {}
        for alarm in data.alarms:
            if alarm.on == "run":
                self._alarms.setdefault(alarm.subject, []).append(alarm)
        self._maker.forget(self._runs)
        self.draw()
        self._draw_panes()

    def draw(self) -> None:
        """Draw the runs that match the filter."""
        maker = self._maker
        maker.width = _fitting(_SPARK, self.size.width)
        maker.may_act = self.lorad.may_act
        maker.alarms = self._alarms
        maker.devices = devices_of(self._news.pools) if "device" in maker.columns else {}
        maker.costs = self._news.costs
        runs = self._runs
        if words := filter.words(self._filter.value):
            kinds = {name: " ".join(alarm.kind for alarm in self._alarms.get(name, ())) for name in runs}
            runs = {n: run for n, run in runs.items() if filter.has(filter.fields(run, kinds[n]), words)}
        scale = None
        if "recent" in maker.columns:  # the least and the largest recent reward, on which all rows are drawn
            before = self._spans
            self._spans = {}
            for name, run in runs.items():
                last = before.get(name)
                recent = run.recent[-maker.width :]
                self._spans[name] = last if last and last[0] is run else (run, span([recent]))
            scale = span([ends for _, ends in self._spans.values() if ends])
        maker.scale = scale
        maker.has_losses = has_losses(runs.values())
        titles = {"reward": "figure"} if maker.has_losses else {}
        if scale and self.size.width >= _WIDE:  # there is room for the ends of the scale
            titles["recent"] = f"recent {scale[0]:.3g}…{scale[1]:.3g}"
        self.table.titles = titles
        self._rows, parents = folded(runs.values(), self._opened)
        self.table.show(Lazy(self._rows, self._cells_of), Lazy(self._rows, self._values_of), parents)
        self.table.set_class(not runs, "-none")
        empty = self.query_one("#empty", Line)
        none = f"No run has all of: {one_line(self._filter.value)}\n\nesc shows all runs again."
        empty.say(none if self._runs else _EMPTY)
        empty.set_class(bool(runs), "-none")
        if runs and self.focused is None:
            self.table.focus()
        self._draw_frame()

    def _cells_of(self, key: str) -> dict[str, Text]:
        if (sweep := sweep_of(key)) is not None:
            return self._sweeps.cells(self._rows[key], is_open=sweep in self._opened)
        run = self._runs[key]
        return self._maker.cells(run, is_member=bool(run.sweep) and key_of(run.sweep or "") in self._rows)

    def _values_of(self, key: str) -> Values:
        group = [self._maker.filled(run) for run in self._rows[key]]
        columns = [self.table.by]
        return sweep_values(group, columns) if sweep_of(key) else values(group[0], columns)

    def _draw_panes(self) -> None:
        news = self._news
        most, last = _fitting(_LINES, self.size.height)
        self.query_one(PoolsPane).fill(news.pools)
        self.query_one(DevicesPane).fill(news.devices)
        self.query_one(Alarms).fill(news.alarms)
        self.query_one(Ticker).fill(news.events)
        lines = {
            "#alarmed": one_liners.alarms_line(news.alarms) if news.alarms else Text(),
            "#pools-lines": one_liners.pools_lines(news.pools, most),
            "#devices-lines": one_liners.devices_lines(news.devices, most),
            "#events-lines": one_liners.events_lines(news.events, last),
        }
        for id, text in lines.items():
            line = self.query_one(id, Line)
            line.say(text)
            line.styles.height = text.plain.count("\n") + 1 if text else 0
        self.query_one(Alarms).set_class(not news.alarms, "-none")

    # -- title and what is under the cursor ------------------------------------------------------------------
    def _draw_frame(self) -> None:
        """Draw the title, and why the run under the cursor waits or ended, its alarms, whose it is."""
        counts = self._counts
        parts = [", ".join(f"{counts[state]:,} {state}" for state in _ORDER if state in counts) or "no runs"]
        parts += [f"{one_liners.speed(self._pace)} tok/s"] if self._pace else []
        parts += [f"{len(self.table.names):,} of {len(self._runs):,} shown"] if self._filter.value else []
        parts += [self.table.says] if self.table.says else []
        parts += ["old runs too"] if self.board.all else []
        self.say_title(Text.assemble(("lorad  ", "bold"), " · ".join(parts)))
        key = self.table.key or ""
        text = ""
        if sweep_of(key) and key in self._rows:
            text = one_line(in_words(self._rows[key]))
        elif run := self._runs.get(key):
            alarms = [alarm for alarm in self._alarms.get(key, ()) if alarm.kind != "ended"]
            parts = [one_line(why(run)), *(one_line(alarm.says) for alarm in alarms)]
            if not self.lorad.may_act(run.owner):
                parts.append(f"belongs to {one_line(str(run.owner))}: it can only be looked at")
            reasons = " · ".join(part for part in parts if part)
            text = f"{one_line(run.name[:80])}: {reasons}" if reasons else ""
        self.query_one("#why", Line).say(text)

    # -- what keys act on ------------------------------------------------------------------------------------
    def targets(self, on: str) -> list[str]:
        """Return the chosen things; in another pane, the run or the pool that its row is about."""
        pane = self.focused
        if on == "pool":
            pool = pane.pools.get(pane.key or "") if isinstance(pane, Pane) else None
            return [pool] if pool else []
        if on != "run":
            return []
        if not isinstance(pane, Pane):
            runs = [run.name for key in self.table.chosen for run in self._rows.get(key, ())]
            return [*dict.fromkeys(runs)]
        run = pane.runs.get(pane.key or "")
        return [run] if run is not None and run in self._runs else []

    def action_act(self, verb: str) -> None:
        """Act on what is chosen; on the row of a sweep, on its runs for which there is something to do."""
        action = VERBS[verb]
        if action.on != "run" or isinstance(self.focused, Pane) or not any(map(sweep_of, self.table.chosen)):
            super().action_act(verb)
            return
        targets = [run for run in self.targets("run") if self.state(run) not in action.over_when]
        if targets:
            self.act(action, targets, self.preset(verb, targets[0]))
        else:
            self.notify(f"No run of the sweep is left to {verb}.", markup=False)

    def run_of(self, target: str) -> Run | None:
        return self._runs.get(target)

    def has(self, target: str) -> bool:
        return target in self._runs or any(pool.pool == target for pool in self._news.pools)

    def _offer(self) -> None:
        names = self.targets("run")
        sweep = sweep_of(self.table.key)
        if sweep is not None and not isinstance(self.focused, Pane):
            self.offer(f"lorad list --sweep {shlex.quote(sweep)}", *names)
            return
        match self.focused:
            case PoolsPane() | DevicesPane() as pane:
                other = f"lorad {pane.id}"
            case Pane():
                other = "lorad top"
            case _:
                other = "lorad list --all" if self.board.all else "lorad list"
        line = f"lorad show {shlex.quote(names[0])}" if names else other
        self.offer(line, *(names or self.targets("pool")))

    # -- events ----------------------------------------------------------------------------------------------
    def on_rows_moved(self, event: Rows.Moved) -> None:
        if event.rows is self.table:
            self._draw_frame()
        self._offer()

    def on_descendant_focus(self) -> None:
        self._offer()

    def on_rows_selected(self, event: Rows.Selected) -> None:
        """Open what the row is about; marked runs over each other."""
        key = event.key
        pane = event.rows
        run = pane.runs.get(key) if isinstance(pane, Pane) else key
        if not isinstance(pane, Pane) and sweep_of(key) is not None:
            self.action_fold()
        elif run is not None and run in self._runs:
            marked = self.table.chosen if pane is self.table else [run]
            first = run if run in marked else marked[0]
            self.lorad.open_run(first, [name for name in marked if name != first])
        elif isinstance(pane, PoolsPane):
            self.lorad.open("pool", key)
        elif isinstance(pane, DevicesPane):
            self.lorad.open("device", key)

    def narrow(self, filter_text: str) -> None:
        """Show the runs that match a filter; all for ""."""
        self._filter.value = filter_text
        self._filter.display = bool(filter_text)
        self.table.focus()

    def on_resize(self, event: events.Resize) -> None:
        if self._news is not _NOTHING:
            self.draw()
            self._draw_panes()

    def on_input_changed(self) -> None:
        self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.display = bool(event.value)
        self.table.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return opens(self, action)

    def action_filter(self) -> None:
        self._filter.display = True
        self.set_focus(self._filter)

    def action_unfilter(self) -> None:
        self.table.unmark()
        self.narrow("")

    def action_next_alarm(self) -> None:
        """Move the cursor to the next row, or the first, that has an alarm."""
        names = self.table.names
        at = self.table.key
        after = names.index(at) + 1 if at in names else 0
        for key in names[after:] + names[:after]:
            is_open = sweep_of(key) in self._opened  # its runs have their own rows
            if not is_open and any(run.name in self._alarms for run in self._rows.get(key, ())):
                self.table.go(key)
                return

    def action_fold(self) -> None:
        """Open the sweep of the row under the cursor, or fold it, with the cursor on its row."""
        group = self._rows.get(self.table.key or "", ())
        sweep = group[0].sweep if group else None
        if sweep is None or key_of(sweep) not in self._rows:
            self.notify("There is no sweep of several runs under the cursor.", markup=False)
            return
        self._opened ^= {sweep}
        self.table.go(key_of(sweep))
        self.draw()

    def action_fold_all(self) -> None:
        sweeps = {sweep for key in self._rows if (sweep := sweep_of(key)) is not None}
        at = self.table.key
        group = self._rows.get(at or "", ())
        self._opened = set() if self._opened & sweeps else sweeps
        if not self._opened and group and group[0].sweep in sweeps:
            self.table.go(key_of(group[0].sweep or ""))
        self.draw()

    def action_pool(self) -> None:
        """Open the pool of the run under the cursor, or of the row of another pane."""
        runs = [self._runs[name] for name in self.targets("run")[:1]]
        pools = self.targets("pool") or [run.pool for run in runs if run.pool]
        if pools and any(pool.pool == pools[0] for pool in self._news.pools):
            self.lorad.open("pool", pools[0])
        else:
            self.notify("The run under the cursor is in no pool that is up.", markup=False)

    # -- columns ---------------------------------------------------------------------------------------------
    @work
    async def action_columns(self) -> None:
        chosen = await self.app.push_screen_wait(ColumnPicker(self._maker.columns))
        if chosen is None or chosen == self._maker.columns:
            return
        self.table.use(shaped(chosen))
        self.board.columns = self._maker.columns = chosen
        self.draw()
        self.lorad.feed.open(self)
        try:
            remember(chosen)
        except LoradError as error:
            self.say_error(error)

    def on_rows_more_asked(self) -> None:
        self.action_columns()

    def action_acknowledge(self) -> None:
        """Hide the alarms of the ended runs among the chosen ones."""
        named = [name for name in self.targets("run") if name in self._alarms]
        ended = [self._runs[name] for name in named if self._runs[name].state == "ended"]
        if not ended:
            self.notify(
                "An alarm that can be acknowledged is of a run that ended; ! goes to it.", markup=False
            )
            return
        try:
            self.lorad.acknowledged.add(ended, self.lorad.box or HERE)
        except LoradError as error:
            self._acted_on = self._subject(self.targets("run"))
            self.say_error(error)
        self.lorad.feed.again()

    def action_all(self) -> None:
        self.board.all = not self.board.all
        self.lorad.feed.open(self)


def _fitting(choices: dict[int, _T], room: int) -> _T:
    """Return the first choice that fits the room. choices: by the least room they need, the largest first."""
    return next(choice for least, choice in choices.items() if room >= least)
