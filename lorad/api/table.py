"""Lists of answers that show as tables and become data frames."""

import html
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

import msgspec

from lorad.text import counted, one_line

if TYPE_CHECKING:
    import pandas
    import polars

T = TypeVar("T")
U = TypeVar("U")
_SHOWN = 20  # rows: the first and the last half of more
_WIDEST = 40  # characters of a cell
_GAP = "  "


def fields(item: Any) -> dict[str, Any]:
    """Return the fields of a Struct as plain data, which make a row."""
    plain = msgspec.to_builtins(item)
    return {key: plain.get(key) for key in item.__struct_fields__}


class Table(list[T]):
    """A list of answers that is a table, too.

    A terminal and Jupyter show it as a table; Jupyter shows a DataFrame where pandas is imported. Only
    `to_pandas` and `to_polars` import pandas and polars.
    """

    def __init__(self, items: Iterable[T] = (), *, row: Callable[[T], dict[str, Any]] = fields) -> None:
        super().__init__(items)
        self._row = row

    @property
    def columns(self) -> list[str]:
        """The names of the columns, first those of the first row, then what other rows have beside them."""
        return list({name: None for row in map(self._row, self) for name in row})

    def rows(self) -> list[dict[str, Any]]:
        """Make a dict of each item, all with the same keys; what an item does not have is None."""
        rows = [self._row(item) for item in self]
        columns = self.columns
        return [{name: row.get(name) for name in columns} for row in rows]

    def column(self, name: str) -> list[Any]:
        """List one value of each item; None where it has none. Raises KeyError for an unknown column."""
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
        columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in self.columns}
        for name, values in columns.items():
            if any(isinstance(value, dict | list) for value in values):  # they may differ from row to row
                columns[name] = [None if v is None else msgspec.json.encode(v).decode() for v in values]
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
        rows = self._shown()
        count = len(self)
        if not count:
            return "(no rows)"
        widths = [
            max(len(name), *(len(row[i]) for row in rows if row is not None))
            for i, name in enumerate(self.columns)
        ]
        fitting = 1
        while fitting < len(self.columns) and sum(widths[: fitting + 1]) + len(_GAP) * fitting <= width:
            fitting += 1

        def line(cells: Sequence[str]) -> str:
            padded = (cell.ljust(size) for cell, size in zip(cells, widths[:fitting], strict=False))
            return _GAP.join(padded).rstrip()

        left_out = f", {len(self.columns) - fitting} more columns" if fitting < len(self.columns) else ""
        body = ("…" if row is None else line(row) for row in rows)
        return "\n".join([line(self.columns), *body, f"({counted(count, 'row')}{left_out})"])

    def _repr_html_(self) -> str:
        if "pandas" in sys.modules:
            frame: Any = self.to_pandas()
            return str(frame._repr_html_() or frame.to_html())
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        between = f'<tr><td colspan="{len(self.columns)}">…</td></tr>'
        body = "".join(
            between if row is None else f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
            for row in self._shown()
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div style="overflow-x: auto">{table}<p>{counted(len(self), "row")}</p></div>'

    def _shown(self) -> list[list[str] | None]:
        """Return the cells of the rows that are shown; None stands for those between."""
        rows = self.rows()
        cells: list[list[str] | None] = [[_cell(name, value) for name, value in row.items()] for row in rows]
        half = _SHOWN // 2
        return cells if len(cells) <= _SHOWN else [*cells[:half], None, *cells[-half:]]


def mapped(table: Table[T], make: Callable[[T], U], back: Callable[[U], T]) -> Table[U]:
    """Make a table of other items with the same rows.

    make: makes an item of the new table.
    back: returns the item that it was made of.
    """
    return Table(map(make, table), row=lambda item: table._row(back(item)))


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and (name == "at" or name.endswith("_at")):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    text = f"{value:.6g}" if isinstance(value, float) else one_line(str(value))
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"
