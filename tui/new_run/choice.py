"""A field with one of a few words: the arrows turn it, a letter goes to the next word that begins with it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text
from textual import events
from textual.message import Message
from textual.widgets import Static

from lorad.tui.actions.table import bindings

_HELP = "?"


class ChoiceField(Static, can_focus=True):
    """A field whose `value` is one of a few words, or "" for the default."""

    BINDINGS = bindings("choice")
    DEFAULT_CSS = """
    ChoiceField { height: 1; width: 1fr; text-wrap: nowrap; text-overflow: ellipsis; background: $surface; }
    ChoiceField:focus { background: $primary; color: $text; text-style: bold; }
    """

    @dataclass
    class Changed(Message):
        """Another word was chosen."""

        choice: "ChoiceField"

        @property
        def control(self) -> "ChoiceField":
            return self.choice

    def __init__(self, words: Sequence[str], default: str, value: str) -> None:
        super().__init__(markup=False)
        self._words = ["", *(word for word in words if word != default)]
        if value not in self._words:
            self._words.append(value)  # what a file says, right or wrong
        self._default = default
        self.value = value

    def on_mount(self) -> None:
        self._draw()

    def _draw(self) -> None:
        shown = Text(f"‹ {self.value or self._default} ›")
        self.update(shown if self.value else shown.append("  default", style="dim"))

    def turn_to(self, value: str) -> None:
        if value != self.value:
            self.value = value
            self._draw()
            self.post_message(self.Changed(self))

    def action_turn(self, by: int) -> None:
        self.turn_to(self._words[(self._words.index(self.value) + by) % len(self._words)])

    def on_click(self) -> None:
        self.action_turn(1)

    def check_consume_key(self, key: str, character: str | None) -> bool:
        """Return whether no binding of the screen gets a key: only `?` passes, since no word has it."""
        return character is not None and character.isprintable() and character != _HELP

    def on_key(self, event: events.Key) -> None:
        """Let no printable key but `?` through to the screen: in a form it is typed."""
        if not event.is_printable or event.key == "space" or event.character == _HELP:
            return
        event.stop()
        event.prevent_default()
        at = self._words.index(self.value)
        after = [*self._words[at + 1 :], *self._words[: at + 1]]
        matching = [word for word in after if (word or self._default).startswith(event.character or "")]
        if matching:
            self.turn_to(matching[0])
