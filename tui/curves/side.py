"""The column beside the curves: the figures of a step and, if there is room, where its seconds went."""

from collections.abc import Callable, Iterable

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical

from lorad.tui.curves.step_table import Colors, Values, column, figures
from lorad.tui.widgets.line import Line

_Before = Callable[[int], Iterable[tuple[int, Values]]]
_HIGH = 28  # lines, from which on the seconds stand here


class CurvesSide(Vertical):
    DEFAULT_CSS = """
    CurvesSide { width: 25; padding: 0 1 0 2; }
    CurvesSide Line { text-wrap: nowrap; text-overflow: clip; }
    CurvesSide #curves-figures { height: auto; }
    CurvesSide #curves-column { height: 1fr; margin-top: 1; }
    """

    _last: tuple[int | None, Values, _Before, Colors] | None = None

    def compose(self) -> ComposeResult:
        yield Line(id="curves-figures")
        yield Line(id="curves-column")

    @property
    def tells_seconds(self) -> bool:
        return self.display and self.size.height >= _HIGH and self.size.width >= 28

    def tell(self, step: int | None, values: Values, before: _Before, colors: Colors) -> None:
        """Show the figures of a step. before: called for so many steps before this one, newest first."""
        self._last = step, values, before, colors
        width, height = self.size
        if not self.display or not width:
            return
        table = figures(step, values, width, height)
        self.query_one("#curves-figures", Line).say(table)
        room = height - table.plain.count("\n") - 2
        upright = column(values, before(room), width, room, colors) if self.tells_seconds else []
        self.query_one("#curves-column", Line).say(Text("\n", no_wrap=True).join(upright))

    def on_resize(self) -> None:
        if self._last is not None:
            self.tell(*self._last)
