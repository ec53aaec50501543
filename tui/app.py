"""The application: one client and one feed, of the box that is shown; a stack of screens for each box."""

import asyncio
import gc
import importlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar, cast

from rich.text import Text
from textual import work
from textual.app import App, SystemCommand
from textual.markup import escape
from textual.reactive import reactive
from textual.screen import Screen
from textual.theme import Theme

from lorad.box.config import Config
from lorad.box.paths import Home
from lorad.client.boxes.hosts import HERE
from lorad.client.client import Client
from lorad.errors import HostUnreachable, LoradError, SpecError
from lorad.text import one_line
from lorad.tui.acknowledged import Acknowledged
from lorad.tui.actions.action import VerbAction
from lorad.tui.actions.table import IDS, ROWS, bindings
from lorad.tui.actions.verbs import VERBS
from lorad.tui.dashboard.screen import Dashboard
from lorad.tui.feed import Feed, Line
from lorad.tui.screens.base import Base
from lorad.tui.watch import LOCAL, BoxWatch, client_of, settings_of

T = TypeVar("T")
# what `open` opens, by its name: the module and the class
SCREENS = {
    "pool": ("details.pool", "PoolScreen"),
    "device": ("details.device", "DeviceScreen"),
    "bill": ("details.bill", "BillScreen"),
    "nodes": ("details.nodes", "NodesScreen"),
    "boxes": ("boxes.screen", "BoxesScreen"),
    "all": ("boxes.runs", "AllRunsScreen"),
    "serving": ("serving.screen", "Serving"),
    "form": ("new_run.screen", "NewRun"),
}
_ONCE = frozenset({"serving", "form", "boxes", "all"})  # are not opened over themselves
# Screens that nobody sees first: read when the dashboard stands.
_LATER = ("run.screen", "palette.screen", "screens.help", *(module for module, _ in SCREENS.values()))
_STANDS = 1.0  # seconds after the beginning
_PATIENCE = 20.0  # seconds for a box to be reached by ssh
_FIRST = "first"  # the mode of the box that is shown at first; each box has a stack of screens, its mode
# name in config.yaml -> Textual's
NAMES = {"dark": "textual-dark", "light": "textual-light", "contrast": "lorad-contrast", "ansi": "ansi-dark"}
_CONTRAST = Theme(
    name="lorad-contrast",
    primary="#00ffff",
    secondary="#ffffff",
    accent="#ffff00",
    warning="#ffff00",
    error="#ff6060",
    success="#00ff00",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#303030",
    dark=True,
)


class _Reached(NamedTuple):
    """A box that was shown: the mode of its screens, and the user's config with the alarms of the box."""

    mode: str
    client: Client
    config: Config


class LoradApp(App[None]):
    """Watches and controls the runs of a daemon. `readonly`: only watches.

    Raises SpecError for a theme or an action id that there is not.
    """

    TITLE = "lorad"
    CSS_PATH = "lorad.tcss"
    BINDINGS = bindings("app")
    MODES = {_FIRST: Dashboard}  # noqa: RUF012, as Textual has it
    DEFAULT_MODE = _FIRST

    lost: reactive[str] = reactive("")  # why there is no daemon
    frozen: reactive[bool] = reactive(False)  # what is shown stays as it is

    def __init__(self, client: Client, *, readonly: bool = False, config: Config | None = None) -> None:
        super().__init__()
        self.config = config or Config()
        self.client = client
        first = HERE if isinstance(client.where, Home) else client.where.name
        self.box = "" if first == HERE else first
        self._reached = {first: _Reached(_FIRST, client, self.config)}
        self.acknowledged = Acknowledged()
        self.boxes = BoxWatch(lambda: self.feed.again(urgent=False), self.acknowledged)
        self.readonly = readonly or self.config.tui.readonly
        self.user: str | None = None  # who may act on what is theirs alone; None: on everything
        self.lines: list[str] = []  # that were typed as commands, oldest first
        self.feed = Feed(client, self)
        self.register_theme(_CONTRAST)
        if unknown := set(self.config.tui.keymap) - set(IDS):
            hint = f"There are: {', '.join(sorted(IDS))}."
            raise SpecError(f"tui.keymap: no action has the id {min(unknown)}", hint=hint)
        chosen = self.config.tui.theme
        if (theme := NAMES.get(chosen, chosen)) not in self.available_themes:
            raise SpecError(f"tui.theme: there is no theme {chosen}", hint=f"There are: {', '.join(NAMES)}.")
        self.theme = theme
        self.set_keymap(self.config.tui.keymap)
        for key, command in self.config.tui.commands.items():
            self.bind(key.lower(), f"user_command('{key}')", description=command.run, show=False)
        self.animation_level = "none"  # each frame would be sent to users who are far away

    def on_mount(self) -> None:
        self.feed.start()
        self.set_timer(_STANDS, lambda: threading.Thread(target=_settle, daemon=True).start())

    def on_unmount(self) -> None:
        self.feed.close()
        self.boxes.close()

    def on_line(self, message: Line) -> None:
        if message.feed is not self.feed:  # of the box that was shown before
            return
        self.lost = message.lost
        self.user = message.user

    def may_act(self, owner: str | None) -> bool:
        return owner is None or self.user is None or owner == self.user

    # -- ways to screens -------------------------------------------------------------------------------------
    def open_run(self, run: str, others: Sequence[str] = (), tab: str = "") -> None:
        from lorad.tui.run.screen import RunScreen

        if isinstance(self.screen, RunScreen) and self.screen.targets("run") == [run]:
            self.screen.show_tab(tab)
        else:
            self.push_screen(RunScreen(run, others, tab))

    def narrow(self, filter_text: str) -> None:
        while len(self.screen_stack) > 1:
            self.pop_screen()
        cast(Dashboard, self.screen).narrow(filter_text)

    @work(exclusive=True, group="box")
    async def show_box(self, name: str, run: str = "") -> None:
        """Show the dashboard of another box, once it answers, with the screens that were open on it before.

        What is asked and done from then on is that box's; `readonly` holds for all of them.
        """
        name = HERE if name == LOCAL else name
        base = self.screen
        if not isinstance(base, Base):
            return
        base.say(Text(f"asking {one_line(name)} …"))
        try:
            reached = self._reached.get(name)
            reached = await _in_time(partial(_reach, name, reached), _PATIENCE)
        except LoradError as error:
            base.say_error(error)
            return
        base.say_command(base.command)
        if self.screen is not base:
            self.notify(f"{one_line(name)} answers; this is still {self.box or HERE}.", markup=False)
            return
        while getattr(self.screen, "OVER_BOXES", False):
            self.pop_screen()
        if reached.client is not self.client:
            self.feed.close()
            self.lost = ""
            self.user = None
            self.client = reached.client
            self.config = reached.config
            self.feed = Feed(self.client, self)
            self.feed.freeze(self.frozen)
            self.feed.start()
            self.box = name
            if name not in self._reached:
                self.add_mode(reached.mode, Dashboard)
            self._reached[name] = reached
            self.switch_mode(reached.mode)
        if run:
            self.open_run(run)

    def use_theme(self, name: str) -> None:
        """Change the colours, or say which there are."""
        if (theme := NAMES.get(name, name)) in self.available_themes:
            self.theme = theme
        else:
            self.notify(
                f"There is no theme {name}. There are: {', '.join(NAMES)}.", severity="error", markup=False
            )

    def open(self, screen: str, about: str | None = None) -> None:
        module, name = SCREENS[screen]
        kind = getattr(importlib.import_module(f"lorad.tui.{module}"), name)
        if screen not in _ONCE or not isinstance(self.screen, kind):
            self.push_screen(kind() if about is None else kind(about))

    # -- keys ------------------------------------------------------------------------------------------------
    def action_help(self) -> None:
        from lorad.tui.screens.help import Help

        if not isinstance(self.screen, Help):
            works = (each.binding.id for each in self.screen.active_bindings.values())
            self.push_screen(Help([id for id in works if id]))

    def action_command_line(self) -> None:
        from lorad.tui.palette.candidates import Source
        from lorad.tui.palette.screen import CommandLine

        if isinstance(self.screen, Base):
            line = CommandLine(self.screen, self.lines, Source(self.screen.client, NAMES))
            self.push_screen(line, lambda plan: plan.go(self) if plan else None)

    def action_user_command(self, key: str) -> None:
        if isinstance(self.screen, Base):
            self.screen.run_own(self.config.tui.commands[key])

    def action_freeze(self) -> None:
        self.frozen = not self.frozen
        self.feed.freeze(self.frozen)

    def action_next_theme(self) -> None:
        names = list(NAMES.values())
        place = names.index(self.theme) + 1 if self.theme in names else 0
        self.theme = names[place % len(names)]

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Offer the actions that the table explains, then the user's commands, then Textual's own."""
        if isinstance(screen, Base):
            for row in (row for row in ROWS if row.keys and row.says):
                title = row.label
                if isinstance(row, VerbAction):
                    targets = [
                        name for name in screen.targets(row.on) if screen.state(name) not in row.over_when
                    ]
                    if not targets or row is not VERBS[row.name]:
                        continue
                    whom = escape(one_line(targets[0])) if len(targets) == 1 else f"{len(targets)} of them"
                    title = f"{row.label} {whom}"
                yield SystemCommand(title, row.says, partial(screen.run_action, row.does))
            for key, command in self.config.tui.commands.items():
                yield SystemCommand(
                    f"{key}: {command.run}", "A command of yours", partial(screen.run_own, command)
                )
        yield from super().get_system_commands(screen)


def _reach(name: str, before: _Reached | None) -> _Reached:
    """Ask a box whether its daemon is there; ssh opens the line if need be. Raises LoradError."""
    client = before.client if before else client_of(name)
    client.status()
    return before or _Reached(f"box {name}", client, settings_of(client.where))


async def _in_time(ask: Callable[[], T], seconds: float) -> T:
    """Ask in a thread, which keeps nobody from leaving. Raises HostUnreachable, or what `ask` raises."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(answer), seconds)
    except TimeoutError:
        hint = "`lorad --host NAME list` waits longer."
        raise HostUnreachable(f"no answer in {seconds:.0f} s", hint=hint) from None


def _settle() -> None:
    """Import the other screens, and tell the garbage collector that all there is by then stays."""
    for name in _LATER:
        importlib.import_module(f"lorad.tui.{name}")
    gc.freeze()
    gc.enable()
