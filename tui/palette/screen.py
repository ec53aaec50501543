"""The line: what is typed, what can follow, and what was wrong, in one place."""

import asyncio
from typing import cast

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from lorad.errors import Conflict, LoradError, NotAllowed
from lorad.text import one_line
from lorad.tui.actions.table import bindings
from lorad.tui.palette.candidates import Candidate, Source
from lorad.tui.palette.plans import Do, Go, without_lorad
from lorad.tui.palette.verbs import SHORT, VERBS, read
from lorad.tui.port import AppPort
from lorad.tui.screens.base import Base

_ABOUT = "tab completes · up and down: lines typed before · enter does it"
_WORD = 26  # cells


class CommandLine(ModalScreen[Go | None]):
    """Does what is typed, and stays with the reason where it cannot.

    history: lines typed before, oldest first.
    """

    DEFAULT_CSS = """
    CommandLine { align: center bottom; background: $background 40%; }
    CommandLine #command { width: 100%; height: auto; max-height: 100%; border: round $primary; padding: 0 1;
        background: $surface; }
    CommandLine OptionList { height: auto; max-height: 10; border: none; padding: 0; text-wrap: nowrap;
        text-overflow: ellipsis; }
    CommandLine #command-says { height: auto; max-height: 4; color: $text-muted; }
    CommandLine #command-says.-wrong { color: $text-error; text-style: bold; }
    CommandLine #command-typed { height: 1; }
    CommandLine #command-colon { width: 2; }
    CommandLine Input { width: 1fr; }
    """
    BINDINGS = bindings("over", "line")
    AUTO_FOCUS = "Input"

    def __init__(self, base: Base, history: list[str], source: Source) -> None:
        super().__init__()
        self._base = base
        self._history = history
        self._source = source
        self._at = len(history)  # the line of the history that is shown
        self._left = ""  # what was typed before it went there
        self._completed = ""  # the line as the list completed it
        self._candidates: list[Candidate] = []
        self._is_busy = False
        self._list = OptionList(markup=False, compact=True)
        self._list.can_focus = False
        self._input = Input(compact=True, select_on_focus=False, placeholder="stop sweep-*")

    def compose(self) -> ComposeResult:
        with Vertical(id="command"):
            yield self._list
            yield Static(id="command-says", markup=False)
            with Horizontal(id="command-typed"):
                yield Static(":", id="command-colon", markup=False)
                yield self._input

    def on_mount(self) -> None:
        self.query_one("#command").border_title = "command"
        self.query_one("#command").border_subtitle = _ABOUT
        self._typed("")

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.value != self._completed:
            self._completed = ""
            self._typed(event.value)

    @work(exclusive=True, group="candidates")
    async def _typed(self, line: str) -> None:
        """Say how the verb is typed, and list what can follow."""
        words = without_lorad(line.split())
        verb = VERBS.get(SHORT.get(words[0], words[0])) if words else None
        self._say(f"{verb.usage}: {verb.says[0].lower()}{verb.says[1:]}" if verb else "")
        candidates = await asyncio.to_thread(self._source.candidates, line)
        if line != self._input.value:
            return
        self._candidates = candidates
        self._list.clear_options()
        for candidate in candidates:
            word = (one_line(candidate.word).ljust(_WORD), "bold")
            self._list.add_option(Option(Text.assemble(word, " ", (one_line(candidate.says), "dim"))))
        self._list.display = bool(candidates)

    def _say(self, text: str, *, is_wrong: bool = False) -> None:
        says = self.query_one("#command-says", Static)
        says.update(Text(text))
        says.set_class(is_wrong, "-wrong")
        says.display = bool(text)

    # -- keys ------------------------------------------------------------------------------------------------
    def action_complete(self, by: int) -> None:
        """Take the next candidate; the only one is whole, so that the next word can follow."""
        many = len(self._candidates)
        if many:
            at = self._list.highlighted
            self._list.highlighted = place = ((0 if by > 0 else -1) if at is None else at + by) % many
            self._take(place, is_last=many == 1)

    def _take(self, at: int, *, is_last: bool) -> None:
        line = self._candidates[at].line
        if is_last and line[-1] not in "=@":
            line += " "
        self._completed = "" if is_last or line[-1] in "=@" else line
        self._input.value = line
        self._input.cursor_position = len(line)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._take(event.option_index, is_last=True)
        self._input.focus()

    def action_recall(self, by: int) -> None:
        at = self._at + by
        if not 0 <= at <= len(self._history):
            return
        if self._at == len(self._history):
            self._left = self._input.value
        self._at = at
        self._input.value = self._left if at == len(self._history) else self._history[at]
        self._input.cursor_position = len(self._input.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if not self._is_busy:
            self._do(event.value)

    @work
    async def _do(self, line: str) -> None:
        """Do what was typed, after a question where something is lost, or say what is wrong with it."""
        self._is_busy = True
        if line.strip() and line not in self._history[-1:]:
            self._history.append(line)
        self._at = len(self._history)
        try:
            plan = await asyncio.to_thread(read, self._base.client, line)
            if isinstance(plan, Do):
                self._base.must_act()
                if self._base.OVER_BOXES:
                    hint = "`box NAME` shows one; keys act on the chosen rows, each on its box."
                    raise Conflict("It does not say on which box, and this screen is about all.", hint=hint)
                for target, owner in plan.owners.items():
                    if not plan.verb.of_others and not cast(AppPort, self.app).may_act(owner):
                        raise NotAllowed(f"{target} belongs to {owner}", hint="Only its owner may do that.")
                many = len(plan.targets) > 1
                if not await self._base.is_meant(plan.verb, plan.targets, plan.values, many=many):
                    return
                await self._base.do_typed(plan.verb, plan.targets, plan.values)
        except LoradError as error:
            self._say(f"✖ {one_line(error.in_full)}", is_wrong=True)
            return
        finally:
            self._is_busy = False
        self.dismiss(plan if isinstance(plan, Go) else None)
