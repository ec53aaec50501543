"""The application: one client, one feed, a stack of screens."""

from __future__ import annotations

from collections.abc import Iterable

from textual.app import App, SystemCommand
from textual.reactive import reactive
from textual.screen import Screen

from lorad.client import Client
from lorad.tui import keys
from lorad.tui.actions import ACTIONS
from lorad.tui.feed import Feed, Line
from lorad.tui.screens.base import RunsBase
from lorad.tui.screens.help import Help
from lorad.tui.screens.runs import RunsScreen


class LoradApp(App[None]):
    """Watches and controls the runs of a daemon. `readonly`: only watches."""

    TITLE = "lorad"
    CSS_PATH = "lorad.tcss"
    BINDINGS = keys.APP

    lost: reactive[str] = reactive("")  # why there is no daemon, in words

    def __init__(self, client: Client, *, readonly: bool = False) -> None:
        super().__init__()
        self.client, self.readonly = client, readonly
        self.feed = Feed(client, self)

    def get_default_screen(self) -> Screen[None]:
        return RunsScreen()

    def on_mount(self) -> None:
        self.feed.start()

    def on_unmount(self) -> None:
        self.feed.close()

    def on_line(self, message: Line) -> None:
        self.lost = message.lost

    def action_help(self) -> None:
        if not isinstance(self.screen, Help):
            self.push_screen(Help())

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What ctrl+p offers: everything that can be done to the run, then Textual's own."""
        if isinstance(screen, RunsBase) and screen.selected() is not None:
            for verb, action in ACTIONS.items():
                yield SystemCommand(f"{verb.capitalize()} the run", action.says, lambda v=verb: screen.action_act(v))
            yield SystemCommand("Copy the command", "The shell's way to do what was done last", screen.action_copy)
        yield from super().get_system_commands(screen)
