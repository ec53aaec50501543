"""Picks one of many by typing a part of its name."""

from collections.abc import Mapping

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from lorad.text import one_line
from lorad.tui.actions.table import bindings

_MOST = 200  # lines that are shown at once


class Choose(ModalScreen[str | None]):
    """Returns the key that was chosen, or None. options: the text of each key, which is what is searched."""

    DEFAULT_CSS = """
    Choose { align: center middle; background: $background 60%; }
    Choose #choice { width: 80; max-width: 95%; height: auto; max-height: 90%;
    padding: 1 2; border: round $primary;
                     background: $surface; }
    Choose Input { margin: 1 0; }
    Choose OptionList { height: auto; max-height: 20; border: none; padding: 0; text-wrap: nowrap;
                        text-overflow: ellipsis; }
    """
    BINDINGS = bindings("over", "choose")
    AUTO_FOCUS = "Input"

    def __init__(self, title: str, options: Mapping[str, Text], chosen: str | None = None) -> None:
        super().__init__()
        self._head = title
        self._options = options
        self._chosen = chosen
        self._keys: list[str] = []  # of the lines that are shown

    def compose(self) -> ComposeResult:
        with Vertical(id="choice"):
            yield Static(Text(one_line(self._head), style="bold"))
            yield Input(placeholder="a part of the name", compact=True)
            yield OptionList(markup=False, compact=True)

    def on_mount(self) -> None:
        self.query_one(OptionList).can_focus = False
        self._fill("")

    def _fill(self, typed: str) -> None:
        words = typed.lower().split()
        matching = {
            key: text
            for key, text in self._options.items()
            if all(word in f"{key} {text.plain}".lower() for word in words)
        }
        self._keys = keys = list(matching)[:_MOST]
        listed = self.query_one(OptionList)
        listed.clear_options()
        listed.add_options([Option(matching[key]) for key in keys] or [Option("none", disabled=True)])
        if keys:
            listed.highlighted = keys.index(self._chosen) if self._chosen in keys and not typed else 0

    def on_input_changed(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def on_input_submitted(self) -> None:
        at = self.query_one(OptionList).highlighted
        self.dismiss(self._keys[at] if self._keys and at is not None else None)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if self._keys:
            self.dismiss(self._keys[event.option_index])

    def action_go(self, by: int) -> None:
        listed = self.query_one(OptionList)
        if by > 0:
            listed.action_cursor_down()
        else:
            listed.action_cursor_up()
