"""A grid of as many charts as there is room for."""

from textual.app import ComposeResult
from textual.containers import Grid
from textual.message import Message

from lorad.tui.curves.chart_widget import Chart

_MOST = 9
_WIDTH, _HEIGHT = 50, 15  # of a chart that is worth looking at


class Charts(Grid, can_focus=True):
    """places: how many charts there is room for. `use` shows the first so many."""

    DEFAULT_CSS = "Charts { width: 1fr; height: 100%; grid-gutter: 0 1; }"

    class Placed(Message):
        """There is room for more of them, or for fewer."""

    places = 1

    def compose(self) -> ComposeResult:
        for index in range(_MOST):
            yield Chart(index)

    def on_mount(self) -> None:
        self.use(1)

    def on_resize(self) -> None:
        places = self._columns() * max(1, min(self.size.height // _HEIGHT, 3))
        if places != self.places:
            self.places = places
            self.post_message(self.Placed())

    def _columns(self) -> int:
        return max(1, min(self.size.width // _WIDTH, 3))

    def use(self, many: int) -> list[Chart]:
        columns = 1 if many == 1 else self._columns()
        charts = list(self.query(Chart))
        for chart in charts:
            chart.display = chart.index < many
        self.styles.grid_size_columns, self.styles.grid_size_rows = columns, -(-many // columns)
        return charts[:many]
