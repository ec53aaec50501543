"""Shows what the processes of a run print: one of them at a time, followed, and filtered line by line."""

import shlex
from collections.abc import Sequence
from typing import NamedTuple, cast

from rich.text import Text
from textual.app import ComposeResult
from textual.events import Click
from textual.message import Message
from textual.widgets import Input

from lorad.client.client import Client
from lorad.client.shapes import RunDetails
from lorad.states import RunState
from lorad.text import size
from lorad.tui import keys
from lorad.tui.feed import Changes
from lorad.tui.port import AppPort
from lorad.tui.run.log_lines import LogLines, clean
from lorad.tui.run.log_view import LogView
from lorad.tui.screens.tab import RunTab
from lorad.tui.widgets.line import Line

BEGIN = -(1 << 19)  # bytes before the end that are read at first
_BEHIND = 4 << 20  # bytes that are not read any more when a log grows faster than it is looked at
_MOST_SERVERS = 32


class _Part(NamedTuple):
    """A part of the log of process `of`.

    is_new: it replaces what was shown before.
    before: bytes of the log that are left out.
    sources: the processes that have logs.
    """

    of: str
    sources: list[str]
    text: str
    is_new: bool
    before: int


class Sources(Line):
    """The processes, the one that is shown marked by brackets; a click chooses one."""

    class Chosen(Message):
        def __init__(self, of: str) -> None:
            super().__init__()
            self.of = of

    names: Sequence[str] = ()

    def on_click(self, event: Click) -> None:
        at = 0
        for name in self.names:
            at += len(name) + 2
            if event.get_content_offset_capture(self).x < at:
                self.post_message(self.Chosen(name))
                return


class Logs(RunTab):
    TITLE = "logs"
    BINDINGS = keys.LOGS
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
    def read(self, client: Client, changes: Changes, run: RunDetails) -> _Part | None:
        of = self._of
        log = (of, run.attempt if of == "driver" else run.pool)
        is_new = log != self._log or self._offset is None
        if not is_new and RunState(run.state).is_over and not changes.touch(self.run_name):
            return None
        part = client.logs(self.run_name, of=of, offset=BEGIN if is_new else self._offset or 0)
        if not is_new and (part.size < (self._offset or 0) or part.size - part.offset > _BEHIND):
            part, is_new = client.logs(self.run_name, of=of, offset=BEGIN), True  # it was cut, or runs away
        self._log, self._offset = log, part.offset
        if not is_new and not part.text:
            return None
        text, before = part.text, 0
        if is_new and part.size > -BEGIN:
            text = text.partition("\n")[2]  # the first line is not whole
            before = part.size + BEGIN
        return _Part(of, sources(run), clean(text), is_new, before)

    # -- drawing ---------------------------------------------------------------------------------------------
    def show(self, data: _Part) -> None:
        if data.of != self._of:  # another one was chosen meanwhile
            return
        view = self.query_one(LogView)
        self._sources = data.sources
        if data.is_new:
            self._lines.clear()
            self._before = data.before
            self._lines.add(data.text)
            view.changed()
        else:
            view.grown(self._lines.add(data.text))
        self._tell()

    def _tell(self) -> None:
        """Show which process it is, whether it is followed, and how much there is."""
        lines, view = self._lines, self.query_one(LogView)
        line = self.query_one(Sources)
        line.names = self._sources if self._of in self._sources else [*self._sources, self._of]
        names = [(f"[{name}]", "bold") if name == self._of else (f" {name} ", "") for name in line.names]
        parts = ["▼ follows" if view.follows else "‖ stays here, f follows"]
        count = f"{len(lines.all)} line{'' if len(lines.all) == 1 else 's'}"
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
            self.query_one(LogView).changed()
            self._tell()
            cast(AppPort, self.app).feed.again()

    def action_follow(self) -> None:
        self.query_one(LogView).action_scroll_end()

    def action_filter(self) -> None:
        field = self.query_one(Input)
        field.display = True
        self.screen.set_focus(field)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable `unfilter` when there is no filter, so that escape leads back as everywhere."""
        return self.query_one(Input).display if action == "unfilter" else keys.opens(self.screen, action)

    def action_unfilter(self) -> None:
        field = self.query_one(Input)
        field.value, field.display = "", False
        self.query_one(LogView).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._lines.filter(event.value)
        self.query_one(LogView).changed()
        self._tell()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        event.input.display = bool(event.value)
        self.query_one(LogView).focus()


def sources(run: RunDetails) -> list[str]:
    """The processes of a run that print into logs of their own."""
    spec = run.spec
    trainer, rollout = spec.get("trainer") or {}, spec.get("rollout") or {}
    found = ["driver"]
    if run.pool:
        found.append("pool")
        if trainer.get("backend", "builtin") != "builtin":
            found.append("trainer")
        if rollout.get("backend", "builtin") != "builtin" and not rollout.get("urls"):
            servers = min(int(rollout.get("servers") or 1), _MOST_SERVERS)
            found += ["engine", *(f"engine-{number}" for number in range(1, servers))]
    return found
