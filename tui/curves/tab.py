"""The curves of a run, with those of others over them, and what a step was made of."""

import asyncio
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text
from textual import events, work
from textual.app import ComposeResult
from textual.containers import Grid, Horizontal
from textual.message import Message

from lorad.client.client import Client
from lorad.client.words import figure_in_words
from lorad.errors import LoradError, SpecError
from lorad.records.runs import RunDetails
from lorad.text import one_line
from lorad.tui.actions.action import Field
from lorad.tui.actions.table import bindings
from lorad.tui.curves import export, remembered
from lorad.tui.curves.axes import short, x_text
from lorad.tui.curves.chart_widget import RUNS, Chart, Looks
from lorad.tui.curves.drawing import Plot
from lorad.tui.curves.plot import LETTERS, kind, legend, names, nearby, plot, title
from lorad.tui.curves.side import CurvesSide
from lorad.tui.curves.step_reader import Part, StepReader
from lorad.tui.curves.step_table import where
from lorad.tui.curves.view_state import Scene
from lorad.tui.dashboard.run_rows import state_text
from lorad.tui.feed import Changes
from lorad.tui.screens.dialogs import AskDialog
from lorad.tui.screens.tab import RunTab
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.picker import Choose

_MOST = 9
_WIDTH = 50  # of a chart that is worth looking at
_HEIGHT = 15
_BESIDE = ((130, 44), (100, 30), (72, 25))  # width of the table, from a width of the tab on
_LISTED = 500  # runs that ended, to choose from


class Charts(Grid, can_focus=True):
    """The charts, of which `use` shows the first so many. places: how many there is room for."""

    DEFAULT_CSS = "Charts { width: 1fr; height: 100%; grid-gutter: 0 1; }"

    class Placed(Message):
        """The number of charts that fit has changed."""

    places = 1

    def compose(self) -> ComposeResult:
        for index in range(_MOST):
            yield Chart(index)

    def on_mount(self) -> None:
        self.use(1)

    def on_resize(self) -> None:
        places = self._columns() * max(1, min(self.size.height // _HEIGHT, 3))
        if places != self.places:
            self.places = places
            self.post_message(self.Placed())

    def _columns(self) -> int:
        return max(1, min(self.size.width // _WIDTH, 3))

    def use(self, many: int) -> list[Chart]:
        columns = 1 if many == 1 else self._columns()
        charts = list(self.query(Chart))
        for chart in charts:
            chart.display = chart.index < many
        self.styles.grid_size_columns = columns
        self.styles.grid_size_rows = -(-many // columns)
        return charts[:many]


class CurveNames(Line):
    """The names of the metrics; a click picks one."""

    @dataclass
    class Picked(Message):
        """A name was clicked."""

        index: int

    _ends: tuple[int, ...] = ()

    def offer(self, names: Sequence[str], shown: range, current: int) -> None:
        """List the names from as far left as lets the current one be seen. shown: the ones with a chart."""
        text = Text(no_wrap=True, overflow="ellipsis")
        ends = list[int]()
        widths = [Text(name).cell_len + 2 for name in names]
        skipped = 0
        room = max(self.size.width, 20)
        while skipped < current and sum(widths[skipped : current + 1]) > room:
            skipped += 1
        for index, name in enumerate(names):
            if index >= skipped:
                look = "bold reverse" if index == current else "bold" if index in shown else "dim"
                text.append(f" {name} ", look)
            ends.append(text.cell_len)
        self._ends = tuple(ends)
        self.say(text)

    def on_click(self, event: events.Click) -> None:
        index = next((i for i, end in enumerate(self._ends) if event.x < end), None)
        if index is not None:
            self.post_message(self.Picked(index))


class CurvesTab(RunTab):
    TITLE = "curves"
    BINDINGS = bindings("curves")
    DEFAULT_CSS = """
    CurvesTab CurveNames { height: 1; width: 100%; }
    CurvesTab #curves-middle { height: 1fr; }
    CurvesTab #curves-legend { height: 1; width: 100%; padding: 0 1; }
    CurvesTab #curves-where { height: auto; max-height: 2; width: 100%; padding: 0 1; }
    """

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self._reader = StepReader()
        self.scene = Scene(run)
        self._colors: tuple[str, ...] = ("",) * RUNS
        self._drawn: dict[str, Plot] = {}  # what the charts show, by metric

    def compare(self, runs: Sequence[str]) -> None:
        """Show others over the run, as many as can be told apart."""
        for run in runs[: RUNS - 1]:
            self.scene.add(run)
        if len(runs) >= RUNS:
            self._say_too_many()

    def compose(self) -> ComposeResult:
        yield CurveNames()
        with Horizontal(id="curves-middle"):
            yield Charts()
            yield CurvesSide()
        yield Line(id="curves-legend")
        yield Line(id="curves-where")

    # -- reading ---------------------------------------------------------------------------------------------
    def read(self, client: Client, changes: Changes, run: RunDetails) -> list[Part] | None:
        return self._reader.read(client, changes, run, self.scene.others, self.scene.asked_window) or None

    def show(self, data: list[Part]) -> None:
        for part in data:
            self.scene.take(part)
            if part.gone:
                self.notify(one_line(part.gone), markup=False)
        self.scene.more = any(part.more for part in data)
        if self.scene.more:
            self.base.lorad.feed.again()
        self.draw()

    def command(self, metrics: Sequence[str] = ()) -> str:
        """Return the shell's way to the charts of these metrics, or of the current one."""
        scene = self.scene
        look = scene.look
        runs = " ".join(shlex.quote(run) for run in scene.tracks)
        named = [f"--metric {shlex.quote(metric)}" for metric in metrics or [scene.name]]
        parts = [f"lorad plot {runs}", *named]
        parts += [f"--x {look.x}"] if look.x != "step" else []
        parts += [f"--smooth {look.smooth:g}"] if look.smooth else []
        parts += [f"--{name}" for name in ("log", "best") if getattr(look, name)]
        return " ".join(parts)

    # -- drawing ---------------------------------------------------------------------------------------------
    def _each(self) -> Iterator[tuple[str, bool, Chart]]:
        """Yield each metric that is shown, whether keys act on its chart, and that chart."""
        charts = self.query_one(Charts)
        shown = self.scene.shown(charts.places)
        for index, chart in zip(shown, charts.use(len(shown)), strict=True):
            yield self.scene.metrics[index], index == self.scene.metric and len(shown) > 1, chart

    def draw(self) -> None:
        """Draw everything, and have the reader bring more of the window, where not all steps are there."""
        scene = self.scene
        low, high = scene.bounds()
        self._colors = Looks(self).colors
        for metric, _, chart in self._each():
            drawn, flags = plot(metric, scene.runs, scene.look, low, high)
            self._drawn[metric] = drawn
            chart.show(drawn, flags=flags, empty="reading …" if scene.more else "nothing to draw yet")
        self._list_metrics()
        first, last = scene.ends()
        steps = scene.step_bounds()
        every = scene.track.within(*steps).every
        smooth = scene.look.smooth
        axis = scene.look.x
        parts = [
            f"{axis if axis != 'step' else 'steps'} {x_text(axis, low)}–{x_text(axis, high)}"
            + (f" of {x_text(axis, first)}–{x_text(axis, last)}" if scene.look.window.span else ""),
            f"every {every}th" if every > 1 else "",
            "reading …" if scene.more else "",
            f"ema {smooth:g}" if smooth else "",
            "spikes within" if scene.look.spikes else "",
        ]
        line = legend(list(scene.tracks), self._colors, bool(scene.track.evals.xs))
        line.append("  " + " · ".join(part for part in parts if part), "dim")
        self.query_one("#curves-legend", Line).say(line)
        self._point()
        was = scene.asked_window
        scene.asked_window = steps if scene.look.window.span else None
        if scene.asked_window not in (None, was) and every > 1:
            self.base.lorad.feed.again()

    def _list_metrics(self) -> None:
        scene = self.scene
        shown = scene.shown(self.query_one(Charts).places)
        self.query_one(CurveNames).offer([names(metric)[0] for metric in scene.metrics], shown, scene.metric)

    def _point(self) -> None:
        """Draw the cursor, and the figures of its step."""
        scene = self.scene
        values = scene.values()
        steps = scene.steps()
        for metric, now, chart in self._each():
            drawn = self._drawn.get(metric)
            chart.point(scene.marked, title(metric, scene.runs, steps, self._colors, drawn, now=now))
        side = self.query_one(CurvesSide)
        side.tell(scene.step, values, scene.before, self._colors)
        below = self.query_one("#curves-where", Line)
        is_due = self.size.height >= 11 and not side.tells_seconds
        lines = where(values, self.size.width - 2, self._colors) if is_due else []
        below.display = bool(lines)
        below.say(Text("\n").join(lines))

    def on_resize(self) -> None:
        width, height = self.size
        side = self.query_one(CurvesSide)
        beside = next((cells for least, cells in _BESIDE if width >= least), 0)
        side.display = self.scene.table and beside > 0 and height >= 10
        side.styles.width = beside
        self.query_one(CurveNames).display = height >= 6
        self.query_one("#curves-legend").display = height >= 9
        self.call_after_refresh(self.draw)

    # -- the mouse -------------------------------------------------------------------------------------------
    def on_charts_placed(self) -> None:
        self.draw()

    def on_curve_names_picked(self, event: CurveNames.Picked) -> None:
        self._go(event.index)

    def on_chart_pointed(self, event: Chart.Pointed) -> None:
        step = None if event.x is None else self.scene.track.step_at(self.scene.look.x, event.x)
        if event.zoomed:
            self.scene.zoom(2.0**event.zoomed, step)
            self.draw()
        elif event.clicked:
            self.scene.cursor = step
            self._go(self.scene.shown(self.query_one(Charts).places)[event.index])
        else:
            self.scene.hover = step
            self._point()

    # -- keys ------------------------------------------------------------------------------------------------
    def _go(self, metric: int) -> None:
        """Make a metric the current one; after the last one comes the first."""
        scene = self.scene
        places = self.query_one(Charts).places
        page = scene.shown(places)
        scene.metric = metric % len(scene.metrics)
        if scene.shown(places) == page:  # the charts stay: only which one keys act on changes
            self._list_metrics()
            self._point()
            self.base.offer(self.command(), *scene.tracks)
        else:
            self._draw_and_offer()

    def _draw_and_offer(self) -> None:
        self.draw()
        self.base.offer(self.command(), *self.scene.tracks)

    def action_metric(self, by: int) -> None:
        self._go(self.scene.metric + by)

    def action_alone(self) -> None:
        self.scene.alone = not self.scene.alone
        self.draw()

    def action_cursor(self, by: int) -> None:
        """Move the cursor by a number of known steps; the window moves with it."""
        scene = self.scene
        at = scene.cursor if scene.cursor is not None else scene.step_bounds()[1]
        scene.cursor = scene.near(at).nearest(at, by)
        scene.look.window.reveal(scene.track.place(scene.look.x, scene.cursor or 0), *scene.ends())
        if scene.look.window.span:
            self.draw()
        else:
            self._point()

    def action_cursor_to(self, end: int) -> None:
        """Move to the first step, or to the last one, which is then followed."""
        self.scene.cursor = None if end < 0 else self.scene.track.nearest(0)
        if self.scene.look.window.span is not None:
            self.scene.look.window.end = None if end < 0 else 0
        self.draw()

    def _chose(self) -> None:
        """Show what was chosen, and keep it for the next time."""
        remembered.keep(self.scene.choices())
        self._draw_and_offer()

    def action_look(self, what: str) -> None:
        self.scene.change_look(what)
        self._chose()

    def action_hide(self) -> None:
        """Show no chart of the current metric; the last one stays."""
        scene = self.scene
        if len(scene.metrics) > 1:
            del scene.metrics[scene.metric]
            scene.metric = min(scene.metric, len(scene.metrics) - 1)
        self._chose()

    def action_zoom(self, factor: float) -> None:
        self.scene.zoom(factor, self.scene.cursor)
        self.draw()

    def action_move(self, part: float) -> None:
        self.scene.look.window.move(part, *self.scene.ends())
        self.draw()

    def action_tail(self) -> None:
        self.scene.show_tail()
        self.draw()

    def action_figures(self) -> None:
        self.scene.table = not self.scene.table
        remembered.keep(self.scene.choices())
        self.on_resize()

    @work
    async def action_choose_metric(self) -> None:
        options = {}
        for metric in self.scene.measured():
            name, whole = names(metric)
            about = " · ".join(part for part in (kind(metric), whole if whole != name else "") if part)
            value = f"{short(nearby(metric, self.scene.track, self.scene.step)):>9}  "
            options[metric] = Text.assemble((f"{name:<26}", "bold"), value, (about, "dim"))
        chosen = await self.app.push_screen_wait(Choose("Which metric?", options, self.scene.name))
        if chosen is not None:
            if chosen not in self.scene.metrics:
                self.scene.metrics.append(chosen)
            self.scene.metric = self.scene.metrics.index(chosen)
            self._chose()

    @work
    async def action_export(self) -> None:
        """Ask for a file, and write the charts that are seen to it."""
        scene = self.scene
        metrics = [metric for metric, _, _ in self._each()]
        field = Field("file", "file", "--out", ".png, .svg or .csv", _wrong_file)
        name = f"{scene.run}-{'curves' if len(metrics) > 1 else metrics[0].replace('/', '-')}"

        def line(values: dict[str, str]) -> str:
            return f"{self.command(metrics)} --out {shlex.quote(values['file'])}"

        head = f"Export {len(metrics)} charts" if len(metrics) > 1 else "Export a chart"
        name += ".png" if export.has_png() else ".svg"
        values = await self.app.push_screen_wait(AskDialog(head, (field,), line, {"file": name}))
        if values is None:
            return
        window = scene.bounds() if scene.look.window.span else None
        try:
            path = await asyncio.to_thread(
                export.write, values["file"], metrics, dict(scene.tracks), scene.look, window
            )
        except OSError as error:
            self.base.say_error(LoradError(f"{values['file']}: {error.strerror or error}", hint=""))
        except LoradError as error:
            self.base.say_error(error)
        else:
            self.base.say_command(line(values), f"Written to {path}")
            self.notify(f"Written to {path}", markup=False)

    @work
    async def action_compare(self) -> None:
        """Ask for a run, and add it to the comparison or remove it."""
        scene = self.scene
        try:
            runs = await asyncio.to_thread(self.base.client.list, all=True, limit=_LISTED)
        except LoradError as error:
            self.base.say_error(error)
            return
        options = {}
        for run in runs:
            if run.name != scene.run:
                letter = LETTERS[scene.others.index(run.name) + 1] if run.name in scene.others else " "
                parts = (f"{letter} ", (one_line(run.name), "bold"), "  ", state_text(run))
                end = f"  {run.step}/{run.steps or '?'}  {figure_in_words(run)}"
                options[run.name] = Text.assemble(*parts, (end, "dim"))
        chosen = await self.app.push_screen_wait(Choose("Compare with which run?", options))
        if chosen in scene.others:
            scene.drop(chosen)
        elif chosen is not None and len(scene.tracks) == RUNS:
            self._say_too_many()
        elif chosen is not None:
            scene.add(chosen)
            self.base.lorad.feed.again()
        self._draw_and_offer()

    def _say_too_many(self) -> None:
        self.notify(f"More than {RUNS} runs at once cannot be told apart.", markup=False)

    def action_uncompare(self) -> None:
        for run in self.scene.others:
            self.scene.drop(run)
        self._draw_and_offer()


def _wrong_file(name: str) -> str:
    try:
        export.refuse(name)
    except SpecError as error:
        return f"{error.message}. {error.hint}"
    return "it exists already: give another name" if Path(name).expanduser().exists() else ""
