"""A question before something that cannot be undone. The answer is No until the user says otherwise."""

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from lorad.text import one_line
from lorad.tui import keys

HEIGHTS = [(0, "-short"), (15, "-tall")]  # of the terminal, see `DEFAULT_CSS`
_MOST = 12  # names that are listed one by one


class Confirm(ModalScreen[bool]):
    """True: do it. lost: what each of them loses."""

    BINDINGS = keys.OVER + keys.CONFIRM
    AUTO_FOCUS = "#no"
    VERTICAL_BREAKPOINTS = HEIGHTS
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

    def __init__(self, verb: str, lost: dict[str, str]) -> None:
        super().__init__()
        self._verb, self._lost = verb, lost

    def compose(self) -> ComposeResult:
        names = list(self._lost)
        whom = one_line(names[0]) if len(names) == 1 else f"{len(names)} of them"
        with Vertical(id="confirm"):
            yield Static(Text(f"{self._verb} {whom}?", style="bold"), id="head")
            with VerticalScroll(id="lost", can_focus=False):
                yield Static(self._told())
            with Horizontal(id="answers"):
                yield Button("No", id="no")
                yield Button(
                    Text(f"{self._verb} {'it' if len(names) == 1 else 'them'}"), id="yes", variant="error"
                )

    def _told(self) -> Text:
        if len(self._lost) == 1:
            return Text(one_line(next(iter(self._lost.values()))))
        lines = [
            Text.assemble((one_line(name), "bold"), f": {one_line(lost)}")
            for name, lost in self._lost.items()
        ]
        rest = [Text(f"and {len(lines) - _MOST} more")] if len(lines) > _MOST else []
        return Text("\n").join([*lines[:_MOST], *rest])

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_scroll(self, by: int) -> None:
        self.query_one("#lost").scroll_relative(y=by, animate=False)

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)
