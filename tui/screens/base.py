"""The frame of every screen about runs: title, banner, body, status line, keys; and what can be done to a run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer, Static

from lorad.client import Client
from lorad.errors import LoradError
from lorad.states import RunState
from lorad.text import one_line
from lorad.tui import keys
from lorad.tui.actions import ACTIONS, Action, command
from lorad.tui.feed import Changes, Failed, Fresh
from lorad.tui.screens.confirm import Confirm

if TYPE_CHECKING:
    from lorad.tui.app import LoradApp

Json = dict[str, Any]
WIDTHS = [(0, "-narrow"), (72, "-normal")]  # what the styles know, from so many cells on
HEIGHTS = [(0, "-short"), (15, "-middle"), (20, "-tall")]


class Line(Static):
    """Text that is drawn again only when it changed."""

    said = Text()

    def say(self, text: Text | str) -> None:
        text = Text(text) if isinstance(text, str) else text
        if text != self.said:
            self.said = text
            self.update(text)


class RunsBase(Screen[None]):
    """`selected` names the run that keys act on; `command` is the shell's way to do what was done last."""

    BINDINGS = keys.RUN
    HORIZONTAL_BREAKPOINTS = WIDTHS
    VERTICAL_BREAKPOINTS = HEIGHTS

    def __init__(self) -> None:
        super().__init__()
        self.command = "lorad list"
        self._acted_on = ""

    @property
    def lorad(self) -> LoradApp:
        return cast("LoradApp", self.app)

    # -- for the screens to fill -----------------------------------------------------------------------------------
    def body(self) -> Iterable[Widget]:
        raise NotImplementedError

    def selected(self) -> str | None:
        raise NotImplementedError

    def state(self) -> str:
        """Of the selected run."""
        raise NotImplementedError

    def read(self, client: Client, changes: Changes) -> Any | None:
        """See `lorad.tui.feed.View`."""
        raise NotImplementedError

    def show(self, data: Any) -> None:
        """Draw what `read` returned."""
        raise NotImplementedError

    # -- the frame -------------------------------------------------------------------------------------------------
    def compose(self) -> ComposeResult:
        yield Line(id="title")
        yield Line(id="banner")
        yield from self.body()
        yield Line(id="status")
        yield Footer()

    def on_mount(self) -> None:
        self.watch(self.app, "lost", self._tell_lost)

    def on_screen_resume(self) -> None:
        self.lorad.feed.open(self)

    def on_fresh(self, message: Fresh) -> None:
        self.show(message.data)

    def on_failed(self, message: Failed) -> None:
        self.say_error(message.error)

    def _tell_lost(self, lost: str) -> None:
        banner = self.query_one("#banner", Line)
        banner.say(Text(f"! {one_line(lost)}", style="bold"))
        banner.display = bool(lost)

    # -- what can be done ------------------------------------------------------------------------------------------
    def offer(self, run: str | None) -> None:
        """The status line says how the shell shows this run, until something is done to it."""
        if run != self._acted_on:
            self._acted_on = ""
            self.say_command(command("show", run) if run else "lorad list")

    def say_command(self, line: str, result: str = "") -> None:
        self.command = line
        shown = Text.assemble(("$ ", "dim"), one_line(line), (f"   {one_line(result)}" if result else "", "bold"))
        self.query_one("#status", Line).say(shown)

    def say_error(self, error: LoradError) -> None:
        self.query_one("#status", Line).say(
            Text(f"✖ {one_line(error.message)} {one_line(error.hint)}", style="bold red")
        )

    @work
    async def action_act(self, verb: str) -> None:
        """Do it to the selected run, if the user means it."""
        action, run = ACTIONS[verb], self.selected()
        if run is None:
            return
        if self.lorad.readonly:
            self.say_error(LoradError("Read-only: nothing is done.", hint="Start `lorad tui` without --readonly."))
        elif not self._asks(action) or await self.app.push_screen_wait(Confirm(action, run)):
            await self._do(action, run)

    def _asks(self, action: Action) -> bool:
        """Not where the daemon will refuse."""
        return bool(action.question) and self.state() != RunState.ENDED

    async def _do(self, action: Action, run: str) -> None:
        try:
            done = await asyncio.to_thread(action.request, self.lorad.client, run)
        except LoradError as error:
            self._acted_on = run
            self.say_error(error)
            return
        self._acted_on = run
        self.say_command(action.command(run), f"{run} is {done['state']}.")

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self.command)
        self.notify(f"Copied: {one_line(self.command)}", timeout=2, markup=False)
