"""Dialogs: a question before something that cannot be undone, and the fields that an action needs."""

from collections.abc import Callable, Mapping

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Static

from lorad.text import one_line
from lorad.tui.actions.action import Field
from lorad.tui.actions.table import bindings

_HEIGHTS = [(0, "-short"), (15, "-tall")]  # of the terminal, see `DEFAULT_CSS`
_MOST = 12  # names that are listed one by one


class Confirm(ModalScreen[bool]):
    """Asks whether to do it, and returns the answer.

    lost: what will be lost, by target.
    box: where that is; "" is this machine.
    """

    BINDINGS = bindings("over", "confirm")
    AUTO_FOCUS = "#no"
    VERTICAL_BREAKPOINTS = _HEIGHTS
    SCOPED_CSS = False
    DEFAULT_CSS = """
    Confirm { align: center middle; background: $background 60%; }
    Confirm #confirm { width: 64; max-width: 95%; height: auto; max-height: 95%;
    padding: 1 2; border: round $error;
        background: $surface; }
    Confirm #lost { height: auto; max-height: 50vh; margin: 1 0; }
    Confirm #answers { height: auto; align-horizontal: right; }
    Confirm #answers Button { margin-left: 2; }
    Confirm.-short #confirm { padding: 0 1; }
    Confirm.-short #head { max-height: 2; }
    Confirm.-short #lost { margin: 0; max-height: 30vh; }
    Confirm.-short #answers Button { height: 1; border: none; }
    """

    def __init__(self, verb: str, lost: dict[str, str], box: str = "") -> None:
        super().__init__()
        self._verb = verb
        self._box = box
        self._lost = lost

    def compose(self) -> ComposeResult:
        names = list(self._lost)
        whom = one_line(names[0]) if len(names) == 1 else f"{len(names)} of them"
        lines = [Text(one_line(lost)) for lost in self._lost.values()]
        if len(names) > 1:
            lines = [
                Text.assemble((one_line(name), "bold"), ": ", line)
                for name, line in zip(names, lines, strict=True)
            ]
        rest = [Text(f"and {len(lines) - _MOST} more")] if len(lines) > _MOST else []
        on = f" on {one_line(self._box)}" if self._box else ""
        with Vertical(id="confirm"):
            yield Static(Text(f"{self._verb} {whom}{on}?", style="bold"), id="head")
            with VerticalScroll(id="lost", can_focus=False):
                yield Static(Text("\n").join([*lines[:_MOST], *rest]))
            with Horizontal(id="answers"):
                yield Button("No", id="no")
                yield Button(
                    Text(f"{self._verb} {'it' if len(names) == 1 else 'them'}"), id="yes", variant="error"
                )

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_scroll(self, by: int) -> None:
        self.query_one("#lost").scroll_relative(y=by, animate=False)


_Values = dict[str, str]


class AskDialog(ModalScreen[_Values | None]):
    """Returns what was typed, by field, or None if the user left. line: makes the command from the values."""

    BINDINGS = bindings("over", "ask")
    AUTO_FOCUS = "Input"
    VERTICAL_BREAKPOINTS = _HEIGHTS
    SCOPED_CSS = False
    DEFAULT_CSS = """
    AskDialog { align: center middle; background: $background 60%; }
    AskDialog #ask { width: 64; max-width: 95%; height: auto; max-height: 95%; padding: 1 2;
        border: round $primary;
        background: $surface; }
    AskDialog #fields { height: auto; max-height: 40vh; margin-top: 1; }
    AskDialog #line { margin: 1 0; }
    AskDialog #answers { height: auto; align-horizontal: right; }
    AskDialog #answers Button { margin-left: 2; }
    AskDialog.-short #ask { padding: 0 1; }
    AskDialog.-short #fields, AskDialog.-short #line, AskDialog.-short #wrong { margin: 0; }
    AskDialog.-short #fields { max-height: 30vh; }
    AskDialog.-short #line { max-height: 2; }
    AskDialog.-short #head { max-height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    AskDialog.-short #answers Button { height: 1; border: none; }
    AskDialog .field { height: 1; width: 100%; overflow: hidden; }
    AskDialog Label { width: 11; }
    AskDialog Input { width: 1fr; }
    AskDialog #wrong { margin-top: 1; }
    """

    def __init__(
        self, title: str, fields: tuple[Field, ...], line: Callable[[_Values], str], preset: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._head = title
        self._fields = fields
        self._line = line
        self._preset = preset

    def compose(self) -> ComposeResult:
        with Vertical(id="ask"):
            yield Static(Text(one_line(self._head), style="bold"), id="head")
            with VerticalScroll(id="fields", can_focus=False):
                for field in self._fields:
                    with Horizontal(classes="field"):
                        yield Label(Text(field.label))
                        text = self._preset.get(field.key, "")
                        yield Input(
                            text, id=field.key, placeholder=field.says, compact=True, select_on_focus=False
                        )
            yield Static(id="wrong", markup=False)
            yield Static(id="line", markup=False)
            with Horizontal(id="answers"):
                yield Button("Cancel", id="cancel")
                yield Button("Do it", id="go", variant="primary")

    def on_mount(self) -> None:
        self._draw()

    @property
    def values(self) -> _Values:
        return {field.key: self.query_one(f"#{field.key}", Input).value for field in self._fields}

    def _wrong(self) -> str:
        values = self.values
        checked = ((field, field.check(values[field.key])) for field in self._fields)
        return "; ".join(f"{field.label}: {wrong}" for field, wrong in checked if wrong)

    def _draw(self) -> None:
        wrong = self._wrong()
        self.query_one("#wrong", Static).update(
            Text(f"✖ {one_line(wrong)}" if wrong else "", style="bold red")
        )
        self.query_one("#line", Static).update(
            Text("" if wrong else f"$ {one_line(self._line(self.values))}")
        )
        self.query_one("#go", Button).disabled = bool(wrong)

    def on_input_changed(self) -> None:
        self._draw()

    def on_input_submitted(self) -> None:
        self.action_go()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "go":
            self.action_go()
        else:
            self.dismiss(None)

    def action_go(self) -> None:
        if not self._wrong():
            self.dismiss(self.values)
