"""A question before something that cannot be undone. The answer is No until the user says otherwise."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from lorad.text import one_line
from lorad.tui import keys
from lorad.tui.actions import Action


class Confirm(ModalScreen[bool]):
    """True: do it."""

    BINDINGS = keys.CONFIRM
    AUTO_FOCUS = "#no"

    def __init__(self, action: Action, run: str) -> None:
        super().__init__()
        self._action, self._run = action, run

    def compose(self) -> ComposeResult:
        verb = self._action.verb.capitalize()
        with VerticalScroll(id="question", can_focus=False):
            yield Static(Text(f"{verb} {one_line(self._run)}?", style="bold"))
            yield Static(Text(self._action.question))
            with Horizontal(id="answers"):
                yield Button("No", id="no")
                yield Button(Text(f"{verb} it"), id="yes", variant="error")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)
