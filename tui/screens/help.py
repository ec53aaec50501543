"""The keys, straight from their one list."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from lorad.tui import keys
from lorad.tui.actions import ACTIONS

ABOUT = (
    "Filter: words that a run must have; state:running and owner:ann look there only; !word keeps runs without it.\n"
    "The status line shows the shell command for what you see or did; y copies it. ctrl+p finds every command.\n"
    "Curve: mean reward of each step; ◆ held-out evals."
)
NAMES = {"question_mark": "?", "slash": "/", "escape": "esc"}


class Help(ModalScreen[None]):
    BINDINGS = keys.CLOSE

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            yield Static(key_table())
            yield Static(Text(ABOUT))


def key_table() -> Table:
    table = Table.grid(padding=(0, 2))
    for heading, bindings in keys.HELP.items():
        table.add_row(Text(heading, style="bold"), "")
        for binding in bindings:
            if isinstance(binding, Binding):
                table.add_row(Text(key_names(binding), style="cyan"), Text(meaning(binding)))
    return table


def key_names(binding: Binding) -> str:
    return " ".join(NAMES.get(key, key) for key in binding.key.split(","))


def meaning(binding: Binding) -> str:
    """An action on a run says what it does; the others have their description."""
    action = ACTIONS.get((binding.id or "").removeprefix("run."))
    return f"{binding.description}: {action.says[0].lower()}{action.says[1:]}" if action else binding.description
