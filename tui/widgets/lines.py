"""Lines under a heading that stays, with a cursor. Only lines that are seen are drawn, and again only when
they changed.

Textual's DataTable lays out all of its rows and draws each cell through a console: twice the time for every
key and every refresh, beside runs that take the same cores.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Offset, Region, Size
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

_HEAD = 1  # lines of the heading
_NOTHING = Style.null()
Parts = Sequence[Segment]


class Lines(ScrollView, can_focus=True):
    """Base class of widgets that draw lines.

    A subclass defines what is in each line (`heading`, `line`), sets their number (`resize_to`), and reports
    changed ones (`redraw`).
    """

    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"lines--head", "lines--cursor", "lines--hover"}
    DEFAULT_CSS = """
    Lines {
        height: auto; max-height: 100%; overflow-x: hidden; background: $surface; color: $foreground;
        & > .lines--head { background: $panel; color: $foreground; text-style: bold; }
        & > .lines--hover { background: $block-hover-background; }
        & > .lines--cursor {
            background: $block-cursor-blurred-background; color: $block-cursor-blurred-foreground;
            text-style: $block-cursor-blurred-text-style;
        }
        &:focus {
            background-tint: $foreground 5%;
            & > .lines--head { background-tint: $foreground 5%; }
            & > .lines--cursor {
                background: $block-cursor-background; color: $block-cursor-foreground;
                text-style: $block-cursor-text-style;
            }
        }
        &:ansi > .lines--head { background: ansi_bright_blue; color: ansi_default; }
    }
    """

    row_count: int = 0
    cursor_row: reactive[int] = reactive(0, repaint=False)
    _hovered: reactive[int | None] = reactive(None, repaint=False)

    # -- for who inherits ------------------------------------------------------------------------------------
    def heading(self) -> Parts:
        """Return the heading as it is drawn."""
        raise NotImplementedError

    def line(self, row: int) -> Parts:
        raise NotImplementedError

    def moved(self) -> None:
        """Do what follows when the cursor is in another row."""

    def opened(self) -> None:
        """Do what follows Enter, or a click on the row under the cursor."""

    def heading_clicked(self, column: int) -> None:
        """Do what follows a click on the heading, so many cells from its left."""

    def resize_to(self, rows: int) -> None:
        if rows != self.row_count:
            self.row_count = rows
            self.virtual_size = Size(0, rows + _HEAD)
            self.cursor_row = self.validate_cursor_row(self.cursor_row)

    def redraw(self, rows: Iterable[int]) -> None:
        top = _HEAD - self.scroll_offset.y
        seen = [row for row in rows if _HEAD <= row + top < self.size.height]
        if seen:
            self.refresh(*(Region(0, row + top, self.size.width, 1) for row in seen))

    # -- drawing ---------------------------------------------------------------------------------------------
    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base = self.rich_style
        if y < _HEAD:
            return _drawn(self.heading(), self.get_component_rich_style("lines--head"), _NOTHING, width)
        row = y - _HEAD + self.scroll_offset.y
        if row >= self.row_count:
            return Strip.blank(width, base)
        over = _NOTHING
        if row == self._hovered:
            base += self.get_component_rich_style("lines--hover")
        if row == self.cursor_row:
            cursor = self.get_component_rich_style("lines--cursor")
            base = base + cursor
            over = Style.from_color(cursor.color)
        return _drawn(self.line(row), base, over, width)

    # -- the cursor ------------------------------------------------------------------------------------------
    def validate_cursor_row(self, row: int) -> int:
        return max(min(row, self.row_count - 1), 0)

    def watch_cursor_row(self, before: int, now: int) -> None:
        self.redraw((before, now))
        self.show_cursor()
        self.moved()

    def show_cursor(self) -> None:
        """Scroll to the cursor, no further than it takes."""
        seen = max(self.size.height - _HEAD, 1)
        top = min(max(self.scroll_offset.y, self.cursor_row - seen + 1), self.cursor_row)
        if top != self.scroll_offset.y:
            self.scroll_to(y=top, animate=False, force=True)

    def on_resize(self) -> None:
        self.show_cursor()

    def action_move(self, rows: int) -> None:
        """Move the cursor by so many rows."""
        self._hovered = None
        self.cursor_row += rows

    def action_move_screens(self, screens: int) -> None:
        self._hovered = None
        self.cursor_row += screens * (self.size.height - _HEAD)

    def action_select_cursor(self) -> None:
        if self.row_count:
            self.opened()

    # -- the mouse -------------------------------------------------------------------------------------------
    def watch__hovered(self, before: int | None, now: int | None) -> None:
        self.redraw(row for row in (before, now) if row is not None)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        at = event.get_content_offset(self)
        self._hovered = self._row_at(at) if at else None

    def on_leave(self) -> None:
        self._hovered = None

    def on_click(self, event: events.Click) -> None:
        if (at := event.get_content_offset(self)) is None:
            return
        if at.y < _HEAD:
            self.heading_clicked(at.x)
        elif (row := self._row_at(at)) == self.cursor_row and self.row_count:
            self.opened()
        elif row is not None:
            self.cursor_row = row

    def _row_at(self, at: Offset) -> int | None:
        row = at.y - _HEAD + self.scroll_offset.y
        return row if at.y >= _HEAD and row < self.row_count else None


def _drawn(parts: Parts, base: Style, over: Style, width: int) -> Strip:
    """Draw a line. base: the style under those of the parts; over: the style upon them."""
    return Strip(Segment.apply_style(parts, base, over)).adjust_cell_length(width, base)
