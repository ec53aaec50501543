"""Lists of answers that show as tables and become data frames."""

import html
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

import msgspec

from lorad.text import one_line

if TYPE_CHECKING:
    import pandas
    import polars

T = TypeVar("T")
U = TypeVar("U")
_SHOWN = 20  # rows: the first and the last half of more
_WIDEST = 40  # characters of a cell
_GAP = "  "


def fields(item: Any) -> dict[str, Any]:
    """Make a row of a Struct: its fields, as plain data."""
    found = msgspec.to_builtins(item)
    return {key: found.get(key) for key in item.__struct_fields__}


class Table(list[T]):
    """A list of answers that is a table, too.

    It shows as one, in a terminal and in Jupyter, there as a DataFrame where pandas is imported. pandas and
    polars are imported by nothing but `to_pandas` and `to_polars`.
    """

    def __init__(self, items: Iterable[T] = (), *, row: Callable[[T], dict[str, Any]] = fields) -> None:
        super().__init__(items)
        self._row = row

    @property
    def columns(self) -> list[str]:
        """List the names of the columns: those of the first row, then what others have beside them."""
        return list({name: None for row in map(self._row, self) for name in row})

    def rows(self) -> list[dict[str, Any]]:
        """Make a dict of each item, all with the same keys; what an item does not have is None."""
        found, columns = [self._row(item) for item in self], self.columns
        return [{name: row.get(name) for name in columns} for row in found]

    def column(self, name: str) -> list[Any]:
        """List one value of each item; None where it has none. Raises KeyError for no column of that name."""
        if name not in self.columns:
            raise KeyError(f"no column {name!r}: there are {', '.join(self.columns) or 'none'}")
        return [self._row(item).get(name) for item in self]

    def to_pandas(self) -> "pandas.DataFrame":
        """Make a pandas DataFrame, one row an item. Raises ImportError without pandas."""
        import pandas

        return pandas.DataFrame(self.rows(), columns=self.columns)

    def to_polars(self) -> "polars.DataFrame":
        """Make a polars DataFrame, one row an item. Raises ImportError without polars."""
        import polars

        rows = self.rows()
        columns = {name: _for_polars([row[name] for row in rows]) for name in self.columns}
        return polars.DataFrame(columns, strict=False)

    @overload
    def __getitem__(self, place: SupportsIndex, /) -> T: ...
    @overload
    def __getitem__(self, place: slice, /) -> "Table[T]": ...
    def __getitem__(self, place: SupportsIndex | slice, /) -> "T | Table[T]":
        if isinstance(place, slice):
            return Table(super().__getitem__(place), row=self._row)
        return super().__getitem__(place)

    def __repr__(self) -> str:
        width = shutil.get_terminal_size((100, 24)).columns
        return _as_text(self.columns, self._shown(), len(self), width)

    def _repr_html_(self) -> str:
        if "pandas" in sys.modules:
            frame: Any = self.to_pandas()
            return str(frame._repr_html_() or frame.to_html())
        return _as_html(self.columns, self._shown(), len(self))

    def _shown(self) -> list[list[str] | None]:
        """Return the cells of the rows that are shown; None stands for those between."""
        rows = self.rows()
        cells: list[list[str] | None] = [[_cell(name, value) for name, value in row.items()] for row in rows]
        half = _SHOWN // 2
        return cells if len(cells) <= _SHOWN else [*cells[:half], None, *cells[-half:]]


def mapped(table: Table[T], make: Callable[[T], U], back: Callable[[U], T]) -> Table[U]:
    """Make a table of other items with the same rows. back: the item that each was made of."""
    return Table(map(make, table), row=lambda item: table._row(back(item)))


def _for_polars(values: list[Any]) -> list[Any]:
    """Return values of one type: what is nested differently in each row becomes JSON."""
    if any(isinstance(value, dict | list) for value in values):
        return [None if value is None else msgspec.json.encode(value).decode() for value in values]
    return values


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and (name == "at" or name.endswith("_at")):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    text = f"{value:.6g}" if isinstance(value, float) else one_line(str(value))
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _as_text(columns: Sequence[str], rows: Sequence[list[str] | None], count: int, width: int) -> str:
    """Align as many columns as fit, at least one."""
    if not count:
        return "(no rows)"
    widths = [
        max(len(name), *(len(row[i]) for row in rows if row is not None)) for i, name in enumerate(columns)
    ]
    fitting = 1
    while fitting < len(columns) and sum(widths[: fitting + 1]) + len(_GAP) * fitting <= width:
        fitting += 1

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(size) for cell, size in zip(cells, widths[:fitting], strict=False))
        return _GAP.join(padded).rstrip()

    left_out = f", {len(columns) - fitting} more columns" if fitting < len(columns) else ""
    body = ("…" if row is None else line(row) for row in rows)
    return "\n".join([line(columns), *body, f"({count} row{'s' * (count != 1)}{left_out})"])


def _as_html(columns: Sequence[str], rows: Sequence[list[str] | None], count: int) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    between = f'<tr><td colspan="{len(columns)}">…</td></tr>'
    body = "".join(
        between if row is None else f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div style="overflow-x: auto">{table}<p>{count} row{"s" * (count != 1)}</p></div>'
