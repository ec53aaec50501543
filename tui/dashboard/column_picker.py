"""Chooses columns of the table of runs, and their order."""

from collections.abc import Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from lorad.client.columns import is_key
from lorad.text import one_line
from lorad.tui.actions.table import bindings
from lorad.tui.dashboard.run_columns import OFFERED, USUAL

_FIXED = "name"  # the first one, whatever is chosen
_SAYS = {
    "name": "always first",
    "progress": "a bar of the steps",
    "recent": "rewards of the last steps, on one scale for all rows",
    "eval": "held-out reward, first → last",
    "nll": "of held-out completions, nats per token",
    "tok/s": "sampled tokens per second",
    "eta": "time that is left, by the pace so far",
    "took": "time since it was first placed",
    "sweep": "the sweep that started it",
    "group": "of which so many runs work at a time",
    "base": "the model of its spec",
    "device": "where its pool is",
    "cost": "by the prices of config.yaml",
    "origin": "what it continued from",
    "why": "why it waits or ended",
    "trainer.lr": "a key of the spec, like any other that you type",
    "kl": "a metric of the last step, like any other that you type",
}


class _Field(Input):
    """Leaves the blank to the screen: no column has one in its name."""

    def check_consume_key(self, key: str, character: str | None = None) -> bool:
        return key != "space" and super().check_consume_key(key, character)


class ColumnPicker(ModalScreen[tuple[str, ...] | None]):
    """Returns the names of the columns in order, or None where nothing is to change."""

    DEFAULT_CSS = """
    ColumnPicker { align: center middle; background: $background 60%; }
    ColumnPicker #columns { width: 76; max-width: 95%; height: auto; max-height: 95%;
    padding: 0 2; border: round $primary; background: $surface; }
    ColumnPicker Input { margin: 0; }
    ColumnPicker OptionList { height: auto; max-height: 26; margin: 1 0 0 0; border: none; padding: 0;
                              text-wrap: nowrap; text-overflow: ellipsis; }
    ColumnPicker #hint { color: $text-muted; margin-top: 1; }
    """
    BINDINGS = bindings("over", "columns")
    AUTO_FOCUS = "Input"

    def __init__(self, chosen: Sequence[str]) -> None:
        super().__init__()
        self._chosen = [_FIXED, *(name for name in chosen if name != _FIXED)]
        self._names: list[str] = []  # of the columns that are listed
        self._typed = ""  # the text that the names have in them

    def compose(self) -> ComposeResult:
        with Vertical(id="columns"):
            yield Static(Text("Columns", style="bold"))
            yield _Field(placeholder="a part of a name, a key of the spec, a metric", compact=True)
            yield OptionList(markup=False, compact=True)
            yield Static(
                "space or a click: shown or not · shift+↑ shift+↓: its place\n"
                "ctrl+r: the usual ones · enter: done · esc: as before",
                id="hint",
            )

    def on_mount(self) -> None:
        self.query_one(OptionList).can_focus = False
        self._fill(None)

    def _fill(self, at: str | None) -> None:
        """List what fits what was typed, with the cursor on a column or on the first one."""
        typed = self._typed = self.query_one(Input).value.strip()
        others = [name for name in OFFERED if name not in self._chosen]
        self._names = [name for name in (*self._chosen, *others) if typed.lower() in name.lower()]
        if typed and typed not in self._names and is_key(typed):
            self._names.append(typed)
        listed = self.query_one(OptionList)
        listed.clear_options()
        options = []
        for name in self._names:
            is_on = name in self._chosen
            place = f"{self._chosen.index(name) + 1:>2} " if is_on else "   "
            kind = "" if name in OFFERED else "a key of the spec" if "." in name else "a metric"
            says = _SAYS.get(name, kind)
            sign = ("[x] ", "bold green") if is_on else ("[ ] ", "")
            options.append(Text.assemble(sign, (place, "dim"), f"{one_line(name):<16} ", (says, "dim")))
        nothing = Option(Text("no column is called so"), disabled=True)
        listed.add_options(map(Option, options) if options else [nothing])
        if self._names:
            listed.highlighted = self._names.index(at) if at in self._names else 0

    @property
    def _at(self) -> str | None:
        """Return the column under the cursor; the key may come before the field said what was typed."""
        if self.query_one(Input).value.strip() != self._typed:
            self._fill(None)
        at = self.query_one(OptionList).highlighted
        return self._names[at] if self._names and at is not None else None

    # -- keys and mouse --------------------------------------------------------------------------------------
    def on_input_changed(self, event: Input.Changed) -> None:
        if event.value.strip() != self._typed:
            self._fill(None)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if self._names:
            self._toggle(self._names[event.option_index])

    def action_show_or_not(self) -> None:
        if (name := self._at) is not None:
            self._toggle(name)

    def _toggle(self, name: str) -> None:
        if name == _FIXED:
            self.app.bell()
        elif name in self._chosen:
            self._chosen.remove(name)
        else:
            self._chosen.append(name)
        self._fill(name)

    def action_shift(self, by: int) -> None:
        name = self._at
        if name is None or name == _FIXED or name not in self._chosen:
            return
        place = self._chosen.index(name)
        new = max(1, min(place + by, len(self._chosen) - 1))
        self._chosen.insert(new, self._chosen.pop(place))
        self._fill(name)

    def action_usual(self) -> None:
        self._chosen = [*USUAL]
        self._fill(None)

    def action_go(self, by: int) -> None:
        listed = self.query_one(OptionList)
        if by > 0:
            listed.action_cursor_down()
        else:
            listed.action_cursor_up()

    def action_done(self) -> None:
        self.dismiss(tuple(self._chosen))
