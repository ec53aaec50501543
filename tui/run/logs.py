"""Shows what the processes of a run print: one of them at a time, followed, and filtered line by line."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input

from lorad.client.client import Client
from lorad.client.log_lines import level
from lorad.records.runs import RunDetails
from lorad.states import RunState
from lorad.text import size
from lorad.tui.actions.table import bindings
from lorad.tui.feed import Changes
from lorad.tui.run.log_lines import LEVELS, LogLines, clean
from lorad.tui.screens.tab import FilteredTab
from lorad.tui.widgets.line import Line

BEGIN = -(1 << 19)  # bytes before the end that are read at first
_BEHIND = 4 << 20  # bytes that are not read any more when a log grows faster than it is looked at
_MOST_SERVERS = 32


class LogView(ScrollView, can_focus=True):
    """Draws lines that are on the screen; `grow` when there are more, `begin_again` when there are others."""

    BINDINGS = bindings("log")
    DEFAULT_CSS = """
    LogView { height: 1fr; background: $background;
    scrollbar-size-vertical: 1; scrollbar-size-horizontal: 1; }
    """

    class Followed(Message):
        """The view now follows the end of the log, or no longer does."""

    def __init__(self, lines: LogLines, *, id: str) -> None:
        super().__init__(id=id)
        self.lines = lines
        self.follows = True

    def grow(self, gone: int) -> None:
        """Show that there are more lines at the end, and so many (`gone`) fewer at the beginning."""
        before = self.scroll_offset.y
        self.virtual_size = Size(self.lines.width + 2, len(self.lines.shown))
        if self.follows:
            self._to_end()
            self.call_after_refresh(self._to_end)  # a scrollbar below may have come
        elif gone:
            self.scroll_to(y=max(before - gone, 0), animate=False, immediate=True)
        self.refresh()

    def begin_again(self) -> None:
        """Show the log again, from its end."""
        self.virtual_size = Size(self.lines.width + 2, len(self.lines.shown))
        self._follow(True)
        self._to_end()
        self.call_after_refresh(self._to_end)
        self.refresh()

    def _to_end(self) -> None:
        self.scroll_to(y=self.max_scroll_y, animate=False, immediate=True, force=True)

    def _follow(self, follows: bool) -> None:
        if follows is not self.follows:
            self.follows = follows
            self.post_message(self.Followed())

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._follow(round(new_value) >= self.max_scroll_y)

    def on_resize(self) -> None:
        if self.follows:
            self.call_after_refresh(self._to_end)  # it is not known yet how far that is

    def action_scroll_end(self) -> None:
        self._to_end()
        self._follow(True)

    def action_scroll_home(self) -> None:
        self.scroll_to(y=0, animate=False, immediate=True)

    def render_line(self, y: int) -> Strip:
        left, top = self.scroll_offset
        style = self.rich_style
        width = self.size.width
        if top + y >= len(self.lines.shown):
            return Strip.blank(width, style)
        line = self.lines.shown[top + y]
        sign, look = LEVELS[level(line)]
        text = Text.assemble((f"{sign} ", look), (line, look), end="")
        for is_not, word in self.lines.words:
            if not is_not:
                text.highlight_words([word], Style(reverse=True), case_sensitive=False)
        strip = Strip(text.render(self.app.console, end=""))
        return strip.crop_extend(left, left + width, None).apply_style(style)


class Part(NamedTuple):
    """A part of the log of process `of`.

    Attributes:
        is_new: It replaces what was shown before.
        before: How many bytes of the log are left out.
        sources: The processes that have logs.
    """

    of: str
    sources: list[str]
    text: str
    is_new: bool
    before: int


class Sources(Line):
    """The processes, the one that is shown marked by brackets; a click chooses one."""

    @dataclass
    class Chosen(Message):
        """A process was clicked."""

        of: str

    names: Sequence[str] = ()

    def on_click(self, event: Click) -> None:
        at = 0
        for name in self.names:
            at += len(name) + 2
            if event.get_content_offset_capture(self).x < at:
                self.post_message(self.Chosen(name))
                return


class Logs(FilteredTab):
    TITLE = "logs"
    BINDINGS = bindings("logs")
    DEFAULT_CSS = """
    Logs Sources { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    Logs Input { display: none; height: 1; }
    """

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self._of = "driver"
        self._sources = ["driver"]
        self._lines = LogLines()
        self._before = 0
        # what the offset is of; this and the offset are the feed's thread's alone
        self._log: tuple[object, ...] = ()
        self._offset: int | None = None

    def compose(self) -> ComposeResult:
        yield Sources(id="log-sources")
        yield LogView(self._lines, id="log-lines")
        yield Input(id="log-filter", placeholder='words, "two words", !word', compact=True)

    # -- reading, on the feed's thread -----------------------------------------------------------------------
    def read(self, client: Client, changes: Changes, run: RunDetails) -> Part | None:
        of = self._of
        log = (of, run.attempt if of == "driver" else run.pool)
        is_new = log != self._log or self._offset is None
        if not is_new and RunState(run.state).is_over and not changes.touch(self.run_name):
            return None
        return self.part(client, log, sources(run))

    def part(self, client: Client, log: tuple[object, ...], sources: list[str]) -> Part | None:
        """Read what is new of a log, or its end if it is another one. sources: the processes with logs."""
        of = self._of
        is_new = log != self._log or self._offset is None
        part = client.logs(self.run_name, of=of, offset=BEGIN if is_new else self._offset or 0)
        if not is_new and (part.size < (self._offset or 0) or part.size - part.offset > _BEHIND):
            part = client.logs(self.run_name, of=of, offset=BEGIN)  # it was cut, or runs away
            is_new = True
        self._log = log
        self._offset = part.offset
        if not is_new and not part.text:
            return None
        text = part.text
        before = 0
        if is_new and part.size > -BEGIN:
            text = text.partition("\n")[2]  # the first line is not whole
            before = part.size + BEGIN
        return Part(of, sources, clean(text), is_new, before)

    # -- drawing ---------------------------------------------------------------------------------------------
    def show(self, data: Part) -> None:
        if data.of != self._of:  # another one was chosen meanwhile
            return
        view = self.query_one(LogView)
        self._sources = data.sources
        if data.is_new:
            self._lines.clear()
            self._before = data.before
            self._lines.add(data.text)
            view.begin_again()
        else:
            view.grow(self._lines.add(data.text))
        self._tell()

    def _tell(self) -> None:
        """Show which process it is, whether it is followed, and how much there is."""
        lines = self._lines
        view = self.query_one(LogView)
        line = self.query_one(Sources)
        line.names = self._sources if self._of in self._sources else [*self._sources, self._of]
        names = [(f"[{name}]", "bold") if name == self._of else (f" {name} ", "") for name in line.names]
        parts = ["▼ follows" if view.follows else "‖ stays here, f follows"]
        count = f"{len(lines.all)} line{'s' * (len(lines.all) != 1)}"
        parts += [f"{len(lines.shown)} of {count}" if lines.words else count]
        parts += [f"{size(self._before)} before"] * bool(self._before) if lines.all else ["nothing printed"]
        line.say(Text.assemble(*names, ("  " + " · ".join(parts), "dim" if view.follows else "")))

    def on_log_view_followed(self) -> None:
        self._tell()

    def command(self) -> str:
        of = "" if self._of == "driver" else f" --of {self._of}"
        return f"lorad logs {shlex.quote(self.run_name)}{of} -f"

    # -- keys ------------------------------------------------------------------------------------------------
    def on_sources_chosen(self, message: Sources.Chosen) -> None:
        self._choose(message.of)

    def action_turn(self, by: int) -> None:
        names = self._sources
        place = names.index(self._of) if self._of in names else 0
        self._choose(names[(place + by) % len(names)])

    def _choose(self, of: str) -> None:
        if of != self._of:
            self._of = of
            self._lines.clear()
            self.query_one(LogView).begin_again()
            self._tell()
            self.base.lorad.feed.again()

    def action_follow(self) -> None:
        self.query_one(LogView).action_scroll_end()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._lines.filter(event.value)
        self.query_one(LogView).begin_again()
        self._tell()


def sources(run: RunDetails) -> list[str]:
    """Name the processes of a run that print into logs of their own."""
    spec = run.spec
    trainer = spec.get("trainer") or {}
    rollout = spec.get("rollout") or {}
    names = ["driver"]
    if run.pool:
        names.append("pool")
        if trainer.get("backend", "builtin") != "builtin":
            names.append("trainer")
        if rollout.get("backend", "builtin") != "builtin" and not rollout.get("urls"):
            servers = min(int(rollout.get("servers") or 1), _MOST_SERVERS)
            names += ["engine", *(f"engine-{number}" for number in range(1, servers))]
    return names
