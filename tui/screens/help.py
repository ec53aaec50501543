"""The keys, straight from their one list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.keys import key_to_character
from textual.screen import ModalScreen
from textual.widgets import Static

from lorad.tui import keys
from lorad.tui.actions import ACTIONS

if TYPE_CHECKING:
    from lorad.tui.app import LoradApp

KEYS, IDS = 16, 22  # cells
ABOUT = (
    "Filter: words that a run must have; state: owner: base: pool: alarm: look there\n"
    "only, as in state:running owner:ann; !word keeps runs without it.\n"
    "The status line shows the shell command for what you see or did; y copies it. ctrl+p finds every command.\n"
    "The words at the right are ids: tui.keymap of config.yaml gives an id other keys, as in {run.kill: ctrl+k}."
)


class Help(ModalScreen[None]):
    DEFAULT_CSS = """
    Help { align: center middle; background: $background 60%; }
    Help #help { width: 78; max-width: 95%; height: auto; max-height: 95%; padding: 0 2; border: round $primary;
        background: $surface; }
    """
    BINDINGS = keys.CLOSE

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            yield Static(key_table(cast("LoradApp", self.app).config.tui.keymap))
            yield Static(Text(ABOUT))


def key_table(keymap: Mapping[str, str]) -> Group:
    """keymap: other keys than ours, by id."""
    parts: list[RenderableType] = []
    for heading, bindings in keys.HELP.items():
        table = Table.grid(Column(width=KEYS), Column(ratio=1), Column(width=IDS, no_wrap=True), padding=(0, 1))
        table.expand = True
        for binding in bindings:
            if isinstance(binding, Binding):
                typed = Text(key_names(keymap.get(binding.id or "", binding.key)), style="cyan")
                table.add_row(typed, Text(meaning(binding)), Text(binding.id or "", style="dim"))
        parts += [Text(heading, style="bold"), table]
    return Group(*parts)


def key_names(typed: str) -> str:
    """number_sign,escape -> # esc"""
    return " ".join(key_name(key.strip()) for key in typed.split(","))


def key_name(key: str) -> str:
    character = "/" if key == "slash" else key_to_character(key) or ""
    return character if character.isprintable() and character.strip() else "esc" if key == "escape" else key


def meaning(binding: Binding) -> str:
    """What an action does; of the others their description."""
    verb = binding.action.partition("'")[2].rstrip("')")
    action = ACTIONS.get(verb)
    return f"{binding.description}: {action.says[0].lower()}{action.says[1:]}" if action else binding.description
