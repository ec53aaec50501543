"""A table of rows by key: pages, marks, an order; only cells that changed are drawn again, the cursor stays
with its row, so that keys never hit another one.

A page has at most PAGE rows: only theirs are made, and only they decide how wide columns are.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from rich.segment import Segment
from rich.text import Text
from textual.geometry import Region
from textual.message import Message

from lorad.tui import keys
from lorad.tui.widgets.columns import PADDING, Columns, Values, Widths, layout, needed
from lorad.tui.widgets.lines import Lines, Parts

PAGE = 200
MARK = "▌"
_BAR = 2  # cells that a scrollbar takes
_MARK = 3  # cells at the right of the heading that say how many columns did not fit
Cells = dict[str, Text]  # by column
_T = TypeVar("_T")


class Rows(Lines):
    """`show` brings it to what is wanted.

    `key`: the row under the cursor; `chosen`: the marked ones, else it.
    """

    BINDINGS = keys.TABLE

    class Moved(Message):
        """The cursor, the page, the marks, the order, or what is under the cursor changed."""

        def __init__(self, rows: "Rows") -> None:
            super().__init__()
            self.rows = rows

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, Rows.Moved) and message.rows is self.rows

    class Selected(Message):
        """A row was opened."""

        def __init__(self, rows: "Rows", key: str) -> None:
            super().__init__()
            self.rows, self.key = rows, key

    class MoreAsked(Message):
        """The mark of columns that did not fit was clicked."""

    def __init__(self, columns: Columns, *, id: str, marks_missing: bool = False) -> None:
        """marks_missing: say in the heading how many columns did not fit."""
        super().__init__(id=id)
        self._wanted, self._marks_missing = columns, marks_missing
        self._parents: Mapping[str, str] = {}  # row -> the row that it stays below
        self.titles: Mapping[str, str] = {}  # of columns that are called otherwise than their key
        self._right = {column.key for column in columns if column.right}
        self._given: Mapping[str, Cells] = {}  # in the order of who shows them
        self._values: Mapping[str, Values] = {}
        self._names: list[str] = []  # in the order wanted here
        self.on_page: list[str] = []  # keys of its rows
        self._shown: dict[str, Cells] = {}  # what the page shows
        # of what: the cells that were given, and whether it is marked
        self._made: dict[str, tuple[Cells, bool]] = {}
        self._parts: dict[str, tuple[Cells, Parts]] = {}  # of what, and what was drawn
        self._needs: Widths = {}
        self.widths: Widths = {}  # of the columns that are shown
        self.page, self.by, self.is_reversed = 0, "", False
        self.marked: set[str] = set()
        self._later: str | None = None  # where the cursor goes when the table is seen at last

    # -- what is there ---------------------------------------------------------------------------------------
    @property
    def pages(self) -> int:
        return max(1, -(-len(self._names) // PAGE))

    @property
    def key(self) -> str | None:
        return self.on_page[self.cursor_row] if self.on_page else None

    @property
    def names(self) -> list[str]:
        """Keys of all rows, in the order of the screen."""
        return list(self._names)

    @property
    def chosen(self) -> list[str]:
        """Marked rows in order, else the one under the cursor."""
        marked = [key for key in self._names if key in self.marked] if self.marked else []
        return marked or [key for key in (self.key,) if key is not None]

    @property
    def says(self) -> str:
        """Describe what the rows do not show themselves: page, order, marks."""
        parts = [f"page {self.page + 1}/{self.pages}"] if self.pages > 1 else []
        parts += [f"{len(self.marked)} marked"] if self.marked else []
        return " · ".join(parts)

    def cells(self, key: str) -> Cells:
        """Return the cells of a row of the page."""
        return self._shown[key]

    # -- drawing ---------------------------------------------------------------------------------------------
    def use(self, columns: Columns) -> None:
        """Take other columns from the next `show` on, whose first one is the same."""
        if columns != self._wanted:
            self._wanted, self._right = columns, {column.key for column in columns if column.right}
            self._given, self._made, self._parts, self._shown, self.on_page = {}, {}, {}, {}, []
            self._needs, self.widths = {}, {}
            self.by = self.by if any(column.key == self.by for column in columns) else ""

    def show(
        self,
        rows: Mapping[str, Cells],
        values: Mapping[str, Values] | None = None,
        parents: Mapping[str, str] | None = None,
    ) -> None:
        """All rows in order. values: by row, of the columns that rows can be ordered by. parents: the row
        that a row stays below, whatever the order. Only cells of the page are asked for; those of a row that
        are the same object as before did not change."""
        at, self._parents = self.key, parents or {}
        self._given, self._values, self.marked = (
            rows,
            values or {},
            {key for key in self.marked if key in rows},
        )
        self._arrange(at)

    def go(self, key: str) -> None:
        """The cursor to a row, on whatever page."""
        if key in self._given:
            self._arrange(key)

    def on_resize(self) -> None:
        self._draw(self._later or self.key)

    def _arrange(self, at: str | None) -> None:
        """Order and page, with the cursor on row `at` if that is still there."""
        names = list(self._given)
        if self.by:
            names = ordered(
                names, {name: self._values[name].get(self.by) for name in names}, self.is_reversed
            )
        elif self.is_reversed:
            names.reverse()
        self._names = names = _below(names, self._parents) if self._parents else names
        self.page = (
            names.index(at) // PAGE
            if at is not None and at in self._given
            else min(self.page, self.pages - 1)
        )
        self._draw(at)

    def _draw(self, at: str | None) -> None:
        """Draw the page, with the cursor on row `at` if the page has it."""
        if not self.size.width:
            self._later = self._later if at is None else at
            return  # nobody sees it: drawn when it gets a size
        self._later = None
        names, before, shown = (
            self._names[self.page * PAGE : (self.page + 1) * PAGE],
            self.on_page,
            self._shown,
        )
        self.on_page, self._shown = names, {name: self._row(name) for name in names}
        changed = {name for name, row in self._shown.items() if row is not shown.get(name)}
        self._made, self._parts = _kept(self._made, names), _kept(self._parts, names)
        self._lay_out(changed)
        self.resize_to(len(names))
        self.redraw(
            row
            for row, (name, old) in enumerate(zip_longest(names, before))
            if name != old or name in changed
        )
        if at in self._shown:
            self.cursor_row = names.index(at)
        self.moved()

    def _row(self, name: str) -> Cells:
        """Return the cells of a row; the same object as before if nothing changed."""
        given, is_marked = self._given[name], name in self.marked
        made, before = self._made.get(name), self._shown.get(name)
        self._made[name] = given, is_marked
        if before is not None and made is not None and made[0] is given and made[1] == is_marked:
            return before
        row = self._with_mark(name, given)
        return before if before == row else row

    def _with_mark(self, name: str, row: Cells) -> Cells:
        """Put a sign before the first column, so that colour is not the only mark."""
        first = self._wanted[0].key
        return {**row, first: Text(MARK if name in self.marked else " ").append_text(row[first])}

    def _lay_out(self, changed: Iterable[str]) -> None:
        """Other columns only when the room or a width changed."""
        self._needs = needed(self._wanted, (self._shown[name] for name in changed), self._needs)
        arrow = {self.by: max(self._needs[self.by], len(self.by) + 1)} if self.by else {}
        titles = {name: max(self._needs.get(name, 0), len(title)) for name, title in self.titles.items()}
        needs, room = self._needs | titles | arrow, self.size.width - _BAR
        widths = layout(self._wanted, needs, room)
        if self._marks_missing and len(widths) < len(self._wanted):
            widths = layout(self._wanted, needs, room - _MARK)
        if widths != self.widths:
            self.widths = widths
            self._parts.clear()
            self.refresh()

    # -- lines -----------------------------------------------------------------------------------------------
    def heading(self) -> Parts:
        by = f"{self.by}{'▼' if self.is_reversed else '▲'}"
        titles = {name: by if name == self.by else self._title(name) for name in self.widths}
        parts = self._joined({name: Text(title) for name, title in titles.items()})
        missing = len(self._wanted) - len(self.widths)
        if not (self._marks_missing and missing):
            return parts
        used = sum(self.widths.values()) + PADDING * len(self.widths)
        return [*parts, Segment(f"+{missing}›".rjust(max(self.size.width - used - 1, 0)))]

    def _title(self, name: str) -> str:
        title = self.titles.get(name, name)
        return title if len(title) <= self.widths[name] else name

    def line(self, row: int) -> Parts:
        name = self.on_page[row]
        cells = self._shown[name]
        drawn = self._parts.get(name)
        if drawn is None or drawn[0] is not cells:
            drawn = self._parts[name] = cells, self._joined(cells)
        return drawn[1]

    def _joined(self, cells: Cells) -> Parts:
        line = Text()
        for name, width in self.widths.items():
            cell = cells[name].copy()
            cell.truncate(width, overflow="ellipsis")
            cell.align("right" if name in self._right else "left", width)
            line.append(" ").append_text(cell).append(" ")
        return list(line.render(self.app.console))

    def moved(self) -> None:
        self.post_message(self.Moved(self))

    def opened(self) -> None:
        self.post_message(self.Selected(self, self.on_page[self.cursor_row]))

    def heading_clicked(self, column: int) -> None:
        for name, width in self.widths.items():
            column -= width + PADDING
            if column < 0:
                if any(each.orders and each.key == name for each in self._wanted):
                    self._order_by(name, reverse=not self.is_reversed if name == self.by else False)
                return
        if self._marks_missing and len(self.widths) < len(self._wanted):
            self.post_message(self.MoreAsked())

    # -- keys ------------------------------------------------------------------------------------------------
    def action_mark(self) -> None:
        """Mark the row under the cursor, or remove the mark, and move the cursor down."""
        if (name := self.key) is not None:
            self.marked ^= {name}
            self._draw(name)
            self.action_cursor_down()

    def unmark(self) -> None:
        self.marked.clear()
        self._draw(self.key)

    def action_order(self) -> None:
        """Order by the next column; after the last one, use the original order."""
        names = ["", *(column.key for column in self._wanted if column.orders and column.key in self.widths)]
        self._order_by(names[(names.index(self.by) + 1) % len(names)] if self.by in names else "")

    def action_reverse(self) -> None:
        self._order_by(self.by, reverse=not self.is_reversed)

    def _order_by(self, name: str, *, reverse: bool = False) -> None:
        self.by, self.is_reversed = name, reverse
        self._arrange(self.key)
        self.refresh(Region(0, 0, self.size.width, 1))

    def action_cursor_down(self) -> None:
        """Past the end of a page the next one begins."""
        if self.cursor_row == len(self._shown) - 1 and self.page < self.pages - 1:
            self.turn(self.page + 1, 0)
        else:
            super().action_cursor_down()

    def action_cursor_up(self) -> None:
        if self.cursor_row == 0 and self.page:
            self.turn(self.page - 1, PAGE - 1)
        else:
            super().action_cursor_up()

    def action_first(self) -> None:
        self.turn(0, 0)

    def action_last(self) -> None:
        self.turn(self.pages - 1, (len(self._names) - 1) % PAGE if self._names else 0)

    def turn(self, page: int, row: int) -> None:
        """Go to a row of a page."""
        if page != self.page:
            self.page = page
            self._draw(None)
        self.cursor_row = row


def ordered(names: Sequence[str], values: Mapping[str, Any], is_reversed: bool) -> list[str]:
    """Order names by value; those without a value or with NaN come last in either direction."""
    has = [name for name in names if values[name] is not None and values[name] == values[name]]
    rest = [name for name in names if values[name] is None or values[name] != values[name]]
    by = {name: (isinstance(values[name], str), values[name]) for name in has}
    return [*sorted(has, key=by.__getitem__, reverse=is_reversed), *rest]


def _below(names: Sequence[str], parents: Mapping[str, str]) -> list[str]:
    """Put the rows that have a parent below it, in the order that they have."""
    found: dict[str, list[str]] = {name: [name] for name in names if name not in parents}
    for name in names:
        if name in parents:
            found[parents[name]].append(name)
    return [name for group in found.values() for name in group]


def _kept(of: Mapping[str, _T], names: Iterable[str]) -> dict[str, _T]:
    return {name: of[name] for name in names if name in of}
