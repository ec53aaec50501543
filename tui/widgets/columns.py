"""Makes the cells of a table's rows, and decides which columns fit and how wide they are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.text import Text

from lorad.text import one_line

PADDING = 2  # cells beside each column


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    Attributes:
        least: How many cells it is wide at least.
        most: How many cells it is wide at most.
        leaves: The larger, the sooner it goes when there is no room; with 0 it never goes.
        rest: It takes the room that is left.
        orders: Rows can be ordered by it.
        shrinks: How many cells it shrinks to before others go; with 0 it does not shrink.
    """

    key: str
    least: int
    most: int
    leaves: int
    right: bool = False
    rest: bool = False
    orders: bool = False
    shrinks: int = 0


Columns = Sequence[TableColumn]
Widths = dict[str, int]
Cells = dict[str, Text]  # by column
Value = str | float | None  # what a column is ordered by; None goes last
Values = Mapping[str, Value]
Fact = str | float | tuple[str, Value]  # what a column says and is ordered by, or one and the other


class TableRow(NamedTuple):
    cells: Cells
    values: dict[str, Value]


def row_of(facts: Mapping[str, Fact], style: str = "") -> TableRow:
    row = TableRow({}, {})
    for key, fact in facts.items():
        text, value = fact if isinstance(fact, tuple) else (str(fact), fact)
        row.cells[key] = Text(one_line(text), style)
        row.values[key] = value
    return row


def needed(columns: Columns, rows: Iterable[dict[str, Text]], before: Widths) -> Widths:
    """Return the width of every column, as before or, where a cell of `rows` is wider, as wide as that."""
    widths = {column.key: max(column.least, len(column.key)) for column in columns} | before
    for row in rows:
        for column in columns:
            if not column.rest:
                widths[column.key] = min(max(widths[column.key], row[column.key].cell_len), column.most)
    return widths


def layout(columns: Columns, needs: Widths, room: int) -> Widths:
    """Return the columns that fit into `room` cells, in order, with their widths; the first one always."""
    widths = {column.key: min(needs[column.key], column.shrinks or needs[column.key]) for column in columns}
    for column in sorted(columns[1:], key=lambda column: -column.leaves):
        if not column.leaves or _left(widths, room) >= 0:
            break
        del widths[column.key]
    for column in columns:
        if column.key in widths:  # what shrank grows again as far as there is room
            widths[column.key] += max(min(needs[column.key] - widths[column.key], _left(widths, room)), 0)
    for column in columns:
        if column.rest and column.key in widths:
            widths[column.key] += max(_left(widths, room), 0)
    return widths


def _left(widths: Widths, room: int) -> int:
    """Count the cells that no column takes; negative where the columns do not fit."""
    return room - sum(widths.values()) - PADDING * len(widths)
