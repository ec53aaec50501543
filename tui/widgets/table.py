"""A table of rows by key under a heading that stays: pages, marks, an order; only cells that changed are
drawn again, the cursor stays with its row, so that keys never hit another one.

A page has at most PAGE rows: only theirs are made, and only they decide how wide columns are. Textual's
DataTable draws all of its cells that are seen again when one of them changes, each through a console: 18
times the processor of this one for a refresh (docs/lab/benchmarks.md), beside runs that take the same cores.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Offset, Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from lorad.tui.actions.table import bindings
from lorad.tui.widgets.columns import PADDING, Cells, Columns, TableRow, Values, Widths, layout, needed

PAGE = 200
MARK = "▌"
_BAR = 2  # cells that a scrollbar takes
_MARK = 3  # cells at the right of the heading that say how many columns did not fit
_HEAD = 1  # lines of the heading
_NOTHING = Style.null()
_Parts = Sequence[Segment]


class Rows(ScrollView, can_focus=True):
    """A table of rows, which `show` fills."""

    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("home", "move_to(0)", show=False),
        Binding("end", "move_to(-1)", show=False),
        *bindings("table"),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"rows--head", "rows--cursor", "rows--hover"}
    DEFAULT_CSS = """
    Rows {
        height: auto; max-height: 100%; overflow-x: hidden; background: $surface; color: $foreground;
        & > .rows--head { background: $panel; color: $foreground; text-style: bold; }
        & > .rows--hover { background: $block-hover-background; }
        & > .rows--cursor {
            background: $block-cursor-blurred-background; color: $block-cursor-blurred-foreground;
            text-style: $block-cursor-blurred-text-style;
        }
        &:focus {
            background-tint: $foreground 5%;
            & > .rows--head { background-tint: $foreground 5%; }
            & > .rows--cursor {
                background: $block-cursor-background; color: $block-cursor-foreground;
                text-style: $block-cursor-text-style;
            }
        }
        &:ansi > .rows--head { background: ansi_bright_blue; color: ansi_default; }
    }
    """

    row_count: int = 0
    cursor_row: reactive[int] = reactive(0, repaint=False)
    _hovered: reactive[int | None] = reactive(None, repaint=False)

    @dataclass
    class Moved(Message):
        """The cursor, the page, the marks, the order, or what is under the cursor changed."""

        rows: "Rows"

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, Rows.Moved) and message.rows is self.rows

    @dataclass
    class Selected(Message):
        """A row was opened."""

        rows: "Rows"
        key: str

    class MoreAsked(Message):
        """The mark of columns that did not fit was clicked."""

    def __init__(self, columns: Columns, *, id: str, marks_missing: bool = False) -> None:
        """Make an empty table. marks_missing: say in the heading how many columns did not fit."""
        super().__init__(id=id)
        self._columns = columns
        self._marks_missing = marks_missing
        self._parents: Mapping[str, str] = {}  # row -> the row that it stays below
        self.titles: Mapping[str, str] = {}  # of columns that are called otherwise than their key
        self._right = {column.key for column in columns if column.right}
        self._cells: Mapping[str, Cells] = {}  # in the order of who shows them
        self._values: Mapping[str, Values] = {}
        self.names: list[str] = []  # keys of all rows, in the order of the screen
        self.on_page: list[str] = []  # keys of its rows
        self._shown: dict[str, Cells] = {}  # what the page shows
        self._sources: dict[str, tuple[Cells, bool]] = {}  # what a row was made of, and whether it is marked
        self._parts: dict[str, tuple[Cells, _Parts]] = {}  # of what, and what was drawn
        self._needs: Widths = {}
        self.widths: Widths = {}  # of the columns that are shown
        self.page = 0
        self.by = ""
        self.is_reversed = False
        self.marked: set[str] = set()
        self._later: str | None = None  # where the cursor goes when the table is seen at last

    # -- what is there ---------------------------------------------------------------------------------------
    @property
    def pages(self) -> int:
        return max(1, -(-len(self.names) // PAGE))

    @property
    def key(self) -> str | None:
        """Return the row under the cursor."""
        return self.on_page[self.cursor_row] if self.on_page else None

    @property
    def chosen(self) -> list[str]:
        """Return the marked rows in order, else the row under the cursor."""
        marked = [key for key in self.names if key in self.marked] if self.marked else []
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
        if columns != self._columns:
            self._columns = columns
            self._right = {column.key for column in columns if column.right}
            self._cells = {}
            self._sources = {}
            self._parts = {}
            self._shown = {}
            self.on_page = []
            self._needs = {}
            self.widths = {}
            self.by = self.by if any(column.key == self.by for column in columns) else ""

    def show(
        self,
        rows: Mapping[str, Cells],
        values: Mapping[str, Values] | None = None,
        parents: Mapping[str, str] | None = None,
    ) -> None:
        """Show all rows in order.

        rows: the cells by row. Only the page's are asked for; the same object as before means no change.
        values: by row, what rows can be ordered by.
        parents: the row that a row stays below, whatever the order.
        """
        at = self.key
        self._parents = parents or {}
        self._cells = rows
        self._values = values or {}
        self.marked = {key for key in self.marked if key in rows}
        self._arrange(at)

    def show_rows(self, rows: Mapping[str, TableRow]) -> None:
        """Show rows that `row_of` has made."""
        self.show(
            {key: row.cells for key, row in rows.items()}, {key: row.values for key, row in rows.items()}
        )

    def go(self, key: str) -> None:
        """Move the cursor to a row, on whatever page."""
        if key in self._cells:
            self._arrange(key)

    def on_resize(self) -> None:
        self._draw(self._later or self.key)
        self._show_cursor()

    def _arrange(self, at: str | None) -> None:
        """Order the rows and find the page, with the cursor on row `at` if that is still there."""
        names = list(self._cells)
        if self.by:
            values = {name: self._values[name].get(self.by) for name in names}
            names = ordered(names, values, self.is_reversed)
        elif self.is_reversed:
            names.reverse()
        if self._parents:  # each row goes below its parent
            groups = {name: [name] for name in names if name not in self._parents}
            for name in names:
                if name in self._parents:
                    groups[self._parents[name]].append(name)
            names = [name for group in groups.values() for name in group]
        self.names = names
        is_there = at is not None and at in self._cells
        self.page = names.index(at) // PAGE if at is not None and is_there else min(self.page, self.pages - 1)
        self._draw(at)

    def _draw(self, at: str | None) -> None:
        """Draw the page, with the cursor on row `at` if the page has it."""
        if not self.size.width:
            self._later = self._later if at is None else at
            return  # nobody sees it: drawn when it gets a size
        self._later = None
        names = self.names[self.page * PAGE : (self.page + 1) * PAGE]
        before = self.on_page
        shown = self._shown
        self.on_page = names
        self._shown = {name: self._row(name) for name in names}
        changed = {name for name, row in self._shown.items() if row is not shown.get(name)}
        self._sources = {name: self._sources[name] for name in names}
        self._parts = {name: self._parts[name] for name in names if name in self._parts}
        self._needs = needed(self._columns, (self._shown[name] for name in changed), self._needs)
        arrow = {self.by: max(self._needs[self.by], len(self.by) + 1)} if self.by else {}
        titles = {name: max(self._needs.get(name, 0), len(title)) for name, title in self.titles.items()}
        needs = self._needs | titles | arrow
        room = self.size.width - _BAR
        widths = layout(self._columns, needs, room)
        if self._marks_missing and len(widths) < len(self._columns):
            widths = layout(self._columns, needs, room - _MARK)
        if widths != self.widths:  # only when the room or a width changed
            self.widths = widths
            self._parts.clear()
            self.refresh()
        if len(names) != self.row_count:
            self.row_count = len(names)
            self.virtual_size = Size(0, len(names) + _HEAD)
            self.cursor_row = self.validate_cursor_row(self.cursor_row)
        self._redraw(
            row
            for row, (name, old) in enumerate(zip_longest(names, before))
            if name != old or name in changed
        )
        if at in self._shown:
            self.cursor_row = names.index(at)
        self.post_message(self.Moved(self))

    def _row(self, name: str) -> Cells:
        """Return the cells of a row; the same object as before if nothing changed."""
        cells = self._cells[name]
        is_marked = name in self.marked
        last_cells, was_marked = self._sources.get(name, (None, False))
        before = self._shown.get(name)
        self._sources[name] = cells, is_marked
        if before is not None and last_cells is cells and was_marked == is_marked:
            return before
        first = self._columns[0].key  # a sign stands before it, so that colour is not the only mark
        row = {**cells, first: Text(MARK if is_marked else " ").append_text(cells[first])}
        return before if before == row else row

    # -- lines -----------------------------------------------------------------------------------------------
    def _redraw(self, rows: Iterable[int]) -> None:
        """Draw those of the rows again that are seen."""
        top = _HEAD - self.scroll_offset.y
        seen = [row for row in rows if _HEAD <= row + top < self.size.height]
        if seen:
            self.refresh(*(Region(0, row + top, self.size.width, 1) for row in seen))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base = self.rich_style
        if y < _HEAD:
            return _strip(self.heading(), self.get_component_rich_style("rows--head"), _NOTHING, width)
        row = y - _HEAD + self.scroll_offset.y
        if row >= self.row_count:
            return Strip.blank(width, base)
        over = _NOTHING
        if row == self._hovered:
            base += self.get_component_rich_style("rows--hover")
        if row == self.cursor_row:
            cursor = self.get_component_rich_style("rows--cursor")
            base = base + cursor
            over = Style.from_color(cursor.color)
        return _strip(self.line(row), base, over, width)

    def heading(self) -> _Parts:
        """Return the heading as it is drawn."""
        cells = {}
        for name, width in self.widths.items():
            title = self.titles.get(name, name)
            cells[name] = Text(title if len(title) <= width else name)
        if self.by in cells:
            cells[self.by] = Text(f"{self.by}{'▼' if self.is_reversed else '▲'}")
        parts = self._joined(cells)
        missing = len(self._columns) - len(self.widths)
        if not (self._marks_missing and missing):
            return parts
        used = sum(self.widths.values()) + PADDING * len(self.widths)
        beside = _BAR if self.show_vertical_scrollbar else 1  # a scrollbar is drawn upon the heading
        return [*parts, Segment(f"+{missing}›".rjust(max(self.size.width - used - beside, 0)))]

    def line(self, row: int) -> _Parts:
        """Return a row as it is drawn; it is made once for the same cells."""
        name = self.on_page[row]
        cells = self._shown[name]
        drawn = self._parts.get(name)
        if drawn is None or drawn[0] is not cells:
            drawn = self._parts[name] = cells, self._joined(cells)
        return drawn[1]

    def _joined(self, cells: Cells) -> _Parts:
        line = Text()
        for name, width in self.widths.items():
            cell = cells[name].copy()
            cell.truncate(width, overflow="ellipsis")
            cell.align("right" if name in self._right else "left", width)
            line.append(" ").append_text(cell).append(" ")
        return list(line.render(self.app.console))

    # -- the cursor and the mouse ----------------------------------------------------------------------------
    def validate_cursor_row(self, row: int) -> int:
        return max(min(row, self.row_count - 1), 0)

    def watch_cursor_row(self, before: int, now: int) -> None:
        self._redraw((before, now))
        self._show_cursor()
        self.post_message(self.Moved(self))

    def _show_cursor(self) -> None:
        """Scroll to the cursor, no further than it takes."""
        seen = max(self.size.height - _HEAD, 1)
        top = min(max(self.scroll_offset.y, self.cursor_row - seen + 1), self.cursor_row)
        if top != self.scroll_offset.y:
            self.scroll_to(y=top, animate=False, force=True)

    def watch__hovered(self, before: int | None, now: int | None) -> None:
        self._redraw(row for row in (before, now) if row is not None)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        at = event.get_content_offset(self)
        self._hovered = self._row_at(at) if at else None

    def on_leave(self) -> None:
        self._hovered = None

    def on_click(self, event: events.Click) -> None:
        if (at := event.get_content_offset(self)) is None:
            return
        if at.y < _HEAD:
            self._click_heading(at.x)
        elif (row := self._row_at(at)) == self.cursor_row:
            self.action_select_cursor()
        elif row is not None:
            self.cursor_row = row

    def _row_at(self, at: Offset) -> int | None:
        row = at.y - _HEAD + self.scroll_offset.y
        return row if at.y >= _HEAD and row < self.row_count else None

    def _click_heading(self, column: int) -> None:
        """Order by the column that is so many cells from the left, or ask for more columns."""
        for name, width in self.widths.items():
            column -= width + PADDING
            if column < 0:
                if any(each.orders and each.key == name for each in self._columns):
                    self._order_by(name, reverse=not self.is_reversed if name == self.by else False)
                return
        if self._marks_missing and len(self.widths) < len(self._columns):
            self.post_message(self.MoreAsked())

    # -- keys ------------------------------------------------------------------------------------------------
    def action_select_cursor(self) -> None:
        if self.row_count:
            self.post_message(self.Selected(self, self.on_page[self.cursor_row]))

    def action_mark(self) -> None:
        """Mark the row under the cursor, or remove the mark, and move the cursor down."""
        if (name := self.key) is not None:
            self.marked ^= {name}
            self._draw(name)
            self.action_move(1)

    def unmark(self) -> None:
        self.marked.clear()
        self._draw(self.key)

    def action_order(self) -> None:
        """Order by the next column; after the last one, use the original order."""
        names = ["", *(column.key for column in self._columns if column.orders and column.key in self.widths)]
        self._order_by(names[(names.index(self.by) + 1) % len(names)] if self.by in names else "")

    def action_reverse(self) -> None:
        self._order_by(self.by, reverse=not self.is_reversed)

    def _order_by(self, name: str, *, reverse: bool = False) -> None:
        self.by = name
        self.is_reversed = reverse
        self._arrange(self.key)
        self.refresh(Region(0, 0, self.size.width, 1))

    def action_move(self, rows: int) -> None:
        """Move the cursor down or up; past the end of a page another one begins."""
        if rows > 0 and self.cursor_row == len(self._shown) - 1 and self.page < self.pages - 1:
            self.turn(self.page + 1, 0)
        elif rows < 0 and self.cursor_row == 0 and self.page:
            self.turn(self.page - 1, PAGE - 1)
        else:
            self._hovered = None
            self.cursor_row += rows

    def action_move_screens(self, screens: int) -> None:
        self._hovered = None
        self.cursor_row += screens * (self.size.height - _HEAD)

    def action_move_to(self, row: int) -> None:
        """Move the cursor to a row of all pages; -1 is the last one."""
        page, row_of_page = divmod(row if row >= 0 else max(row + len(self.names), 0), PAGE)
        self.turn(page, row_of_page)

    def turn(self, page: int, row: int) -> None:
        """Go to a row of a page."""
        if page != self.page:
            self.page = page
            self._draw(None)
        self.cursor_row = row


def _strip(parts: _Parts, base: Style, over: Style, width: int) -> Strip:
    """Draw a line. base: the style under those of the parts; over: the style upon them."""
    return Strip(Segment.apply_style(parts, base, over)).adjust_cell_length(width, base)


def ordered(names: Sequence[str], values: Mapping[str, Any], is_reversed: bool) -> list[str]:
    """Order names by value; those without a value or with NaN come last in either direction."""
    has = [name for name in names if values[name] is not None and values[name] == values[name]]
    rest = [name for name in names if values[name] is None or values[name] != values[name]]
    by = {name: (isinstance(values[name], str), values[name]) for name in has}
    return [*sorted(has, key=by.__getitem__, reverse=is_reversed), *rest]
