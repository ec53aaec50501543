"""The frame of every screen: title, banner, body, status line, keys; and how an action is done from it."""

import asyncio
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.screen import Screen
from textual.widget import Widget
from textual.worker import Worker

from lorad.box.config import UserCommand
from lorad.box.paths import Home
from lorad.client.boxes.hosts import HERE
from lorad.client.client import Client
from lorad.errors import Conflict, LoradError, NotAllowed, SpecError
from lorad.records.runs import Run
from lorad.text import one_line
from lorad.tui.actions.action import VerbAction
from lorad.tui.actions.table import bindings
from lorad.tui.actions.verbs import VERBS
from lorad.tui.feed import Changes, Failed, Fresh
from lorad.tui.port import AppPort
from lorad.tui.screens.dialogs import AskDialog, Confirm
from lorad.tui.user_command import filled_in
from lorad.tui.widgets.keybar import KeyBar
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows

_WIDTHS = [(0, "-narrow"), (72, "-normal"), (140, "-wide")]  # what the styles know, from so many cells on
_HEIGHTS = [(0, "-short"), (15, "-middle"), (20, "-tall"), (40, "-high")]


class Base(Screen[None]):
    """The frame of a screen, which fills in `body`, `read` and `show`.

    Attributes:
        command: The shell's way to what is shown, or to what was done last.
        client: Asks the daemon of the screen's box, which stays the same whatever box is shown later.
        OVER_BOXES: It is about all boxes, and goes when one of them is shown.
    """

    OVER_BOXES: ClassVar[bool] = False
    BINDINGS = bindings("screen")
    HORIZONTAL_BREAKPOINTS = _WIDTHS
    VERTICAL_BREAKPOINTS = _HEIGHTS

    def __init__(self) -> None:
        super().__init__()
        self.command = "lorad list"
        self._acted_on: tuple[str, ...] = ()
        self._offered: tuple[str, ...] = ()
        self._title = Text()

    @property
    def lorad(self) -> AppPort:
        return cast(AppPort, self.app)

    # -- for the screens to fill -----------------------------------------------------------------------------
    def body(self) -> Iterable[Widget]:
        raise NotImplementedError

    def targets(self, on: str) -> list[str]:
        """Return what an action on a `run`, `version`, `alias` or `pool` would act on, most often one."""
        return []

    def run_of(self, target: str) -> Run | None:
        """Return the run that a target is or belongs to, if the screen knows it."""
        return None

    def owner(self, target: str) -> str | None:
        """Return the owner of a target, as far as the screen knows."""
        run = self.run_of(target)
        return run.owner if run else None

    def has(self, target: str) -> bool:
        """Whether it is still there, as far as the screen knows."""
        return True

    def state(self, run: str) -> str:
        """Return the state of a run, or "" if the screen does not know it."""
        details = self.run_of(run)
        return details.state if details else ""

    def preset(self, verb: str, target: str) -> dict[str, str]:
        """Return the initial texts of an action's fields, by their keys."""
        return {}

    def read(self, client: Client, changes: Changes) -> Any | None:
        """Return what to show, or None when nothing of it changed; called on the feed's thread."""
        raise NotImplementedError

    def show(self, data: Any) -> None:
        """Draw what `read` returned."""
        raise NotImplementedError

    # -- the frame -------------------------------------------------------------------------------------------
    def compose(self) -> ComposeResult:
        self.client = self.lorad.client
        yield Line(id="title")
        yield Line(id="banner")
        yield from self.body()
        yield Line(id="status")
        yield KeyBar()

    def on_mount(self) -> None:
        self.watch(self.app, "lost", self._tell_lost)
        self.watch(self.app, "frozen", lambda: self.say_title(self._title))

    def on_screen_resume(self) -> None:
        if self.client is self.lorad.client:
            self.lorad.feed.open(self)

    def on_fresh(self, message: Fresh) -> None:
        self.show(message.data)

    def on_failed(self, message: Failed) -> None:
        self.say_error(message.error)

    def say_title(self, text: Text) -> None:
        """Show a title, marked when the session is read-only or not refreshed."""
        self._title = text
        title = Text()
        if box := self.lorad.box:
            title.append(f" {one_line(box)} ", "reverse" if box == HERE else "bold white on red").append(" ")
        title.append_text(text)
        title.append("  READ-ONLY" if self.lorad.readonly else "")
        title.append("  ‖ NOT REFRESHED: H continues" if self.lorad.frozen else "")
        self.query_one("#title", Line).say(title)

    def _tell_lost(self, lost: str) -> None:
        banner = self.query_one("#banner", Line)
        banner.say(Text(f"! {one_line(lost)}", style="bold"))
        banner.display = bool(lost)

    # -- the status line -------------------------------------------------------------------------------------
    def offer(self, line: str, *targets: str) -> None:
        """Offer the shell command for what is shown here.

        The result of an action, and an error, stay on the status line until another subject is chosen.
        """
        self._offered = targets
        if self._acted_on and not any(map(self.has, self._acted_on)):
            self._acted_on = targets
        if not self._acted_on or self._acted_on != targets:
            self._acted_on = ()
            if self.flagged(line) != self.command:
                self.say_command(line)

    def flagged(self, line: str) -> str:
        """Return a command as it is typed here; where several boxes are shown, it names the screen's."""
        if not self.lorad.box or not line.startswith("lorad ") or line.startswith("lorad --host"):
            return line
        where = self.client.where
        name = HERE if isinstance(where, Home) else where.name
        return f"lorad --host {shlex.quote(name)}{line.removeprefix('lorad')}"

    def say_command(self, line: str, result: str = "") -> None:
        self.command = line = self.flagged(line)
        end = f"   {one_line(result)}" if result else ""
        self.say(Text.assemble(("$ ", "dim"), one_line(line), (end, "bold")))

    def say_error(self, error: LoradError) -> None:
        self.say(Text(f"✖ {one_line(error.in_full)}", style="bold red"))

    def say(self, text: Text) -> None:
        """Show something on the status line, until another subject is chosen."""
        self.query_one("#status", Line).say(text)

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self.command)
        self.notify(f"Copied: {one_line(self.command)}", timeout=2, markup=False)

    # -- what can be done ------------------------------------------------------------------------------------
    def action_act(self, verb: str) -> None:
        targets = self.targets(VERBS[verb].on)
        if targets:
            self.act(VERBS[verb], targets, self.preset(verb, targets[0]))

    @work
    async def act(
        self, verb: VerbAction, targets: Sequence[str], preset: Mapping[str, str] | None = None
    ) -> None:
        """Ask for what is needed, say what will be lost, do it, say what came of it."""
        try:
            self.must_act()
            for target in targets:
                if not verb.of_others and not self.may_act(target):
                    message = f"{target} belongs to {self.owner(target)}: here it can only be looked at."
                    raise NotAllowed(message, hint="")
            if verb.fields and not verb.many and len(targets) > 1:
                message = f"{verb.name} is for one at a time, and {len(targets)} are marked."
                raise Conflict(message, hint="space unmarks.")
            values: Mapping[str, str] | None = {}
            if verb.fields:
                whom = targets[0] if len(targets) == 1 else f"{len(targets)} of them"
                title = f"{verb.label} {whom}" + (f" on {self.far}" if self.far else "")
                line = partial(self.typed_line, verb, targets[0])
                values = await self.app.push_screen_wait(AskDialog(title, verb.fields, line, preset or {}))
            if values is not None and await self.is_meant(verb, targets, values):
                await self._do(verb, targets, values)
        except LoradError as error:
            self._acted_on = self._subject(targets)
            self.say_error(error)

    @work
    async def run_own(self, command: UserCommand) -> None:
        """Run a command of the user's own about the chosen run, and show how it ended."""
        chosen = self.targets("run")
        try:
            self.must_act()
            words = shlex.split(command.run)
            if "$" in command.run:
                if len(chosen) != 1:
                    raise Conflict(f"{words[0]} is about one run, and {len(chosen)} are chosen.", hint="")
                version = "".join(self.targets("version")[:1])
                words = await asyncio.to_thread(filled_in, command, *self.routed(chosen[0]), version)
            line = shlex.join(words)
            question = Confirm("Run", {line: "On this machine, as you; lorad does not know what it does."})
            if command.ask and not await self.app.push_screen_wait(question):
                return
            self.say_command(line, "runs …")
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=asyncio.subprocess.STDOUT
            )
            output, _ = await process.communicate()
            last = output.decode(errors="replace").strip().rpartition("\n")[2]
            self._acted_on = self._subject(chosen)
            result = f"exit code {process.returncode}: {last}" if process.returncode else last or "done"
            self.command = line
            self.say(Text.assemble((one_line(result), "bold"), ("   $ ", "dim"), one_line(line)))
        except OSError as error:
            hint = "tui.commands of config.yaml has it."
            self.say_error(SpecError(f"{words[0]} cannot be run: {error.strerror}", hint=hint))
        except LoradError as error:
            self._acted_on = self._subject(chosen)
            self.say_error(error)

    def may_act(self, target: str) -> bool:
        """Whether the user may change a target, as far as the screen knows."""
        return self.lorad.may_act(self.owner(target))

    def routed(self, target: str) -> tuple[Client, str]:
        """Return whom to ask for something about a target, and what it is called there."""
        return self.client, target

    def typed_line(self, verb: VerbAction, target: str, values: Mapping[str, str]) -> str:
        """Return the command that does an action on a target of this screen."""
        return self.flagged(verb.command(target, values))

    @property
    def far(self) -> str:
        """Name the screen's box; "" for this machine."""
        where = self.client.where
        return "" if isinstance(where, Home) else where.name

    def must_act(self) -> None:
        """Raise NotAllowed where the session is read-only."""
        if self.lorad.readonly:
            raise NotAllowed("Read-only: nothing is done.", hint="Start `lorad tui` without --readonly.")

    async def is_meant(
        self, verb: VerbAction, targets: Sequence[str], values: Mapping[str, str], *, many: bool = False
    ) -> bool:
        """Ask before something is lost. many: ask also where nothing is, and name all targets."""
        lost = dict.fromkeys(targets, "")
        if verb.lost is not None:
            lost = {
                target: await asyncio.to_thread(verb.lost, *self.routed(target), values) for target in lost
            }
        lost = {target: text or verb.says for target, text in lost.items() if text or many}
        if not lost:
            return True
        if self.client is not self.lorad.client:
            raise Conflict("Another box is shown by now: nothing is done.", hint="")
        return await self.app.push_screen_wait(Confirm(verb.label, lost, self.far))

    async def do_typed(self, verb: VerbAction, targets: Sequence[str], values: Mapping[str, str]) -> None:
        """Do what was typed in a line, whatever is chosen here; its result stays as that of a key does."""
        try:
            await self._do(verb, targets, values)
        finally:
            self._acted_on = self._offered

    async def _do(self, verb: VerbAction, targets: Sequence[str], values: Mapping[str, str]) -> None:
        """Do it to each target, whatever became of the others. Raises the last error."""
        refused: LoradError | None = None
        done: dict[str, str] = {}  # command, and what came of it
        for target in targets:
            try:
                client, name = self.routed(target)
                row = await asyncio.to_thread(verb.request, client, name, values)
            except LoradError as error:
                refused = error
                continue
            done[self.typed_line(verb, target, values)] = result = verb.done(target, row)
            self._acted_on = self._subject(targets)
            text = result if len(targets) == 1 else f"{len(done)} of {len(targets)} done."
            self.say_command("; ".join(done), text)
        self.lorad.feed.again()
        self.lorad.boxes.again()
        if refused is not None:
            share = f"{len(done)} of {len(targets)} done; " if done else ""
            raise LoradError(f"{share}{refused.message}", hint=refused.hint)

    def _subject(self, targets: Sequence[str]) -> tuple[str, ...]:
        """Return what `offer` compares with: a result stays as long as the same things are chosen."""
        return tuple(targets)

    # -- ways to other screens -------------------------------------------------------------------------------
    def action_back(self) -> Worker[None] | None:
        self.app.pop_screen()
        return None

    def action_open(self, screen: str) -> None:
        self.lorad.open(screen)


class TableScreen(Base):
    """A screen with one table, which has the focus at first."""

    table: Rows

    def on_mount(self) -> None:
        self.table.focus()
