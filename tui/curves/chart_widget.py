"""A chart on the screen: a title, a picture of curves, a cursor. Lines are made once and kept."""

from dataclasses import dataclass

from rich.color import Color as RichColor
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.color import Color
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from lorad.tui.curves.axes import x_text
from lorad.tui.curves.drawing import GUTTER, Picture, Plot, draw
from lorad.tui.curves.plot import DARK, LIGHT, MARKS

_ANSI = ("cyan", "blue", "green", "red", "magenta", "yellow")
RUNS = len(DARK)  # at most as many at once: more cannot be told apart


class Chart(Widget):
    """A chart at a place among others, to which `show` gives something to draw, `point` title and cursor."""

    DEFAULT_CSS = "Chart { width: 1fr; height: 1fr; }"

    @dataclass
    class Pointed(Message):
        """The mouse is over an x, or (None) left; `clicked`, or turned its wheel by `zoomed` notches."""

        index: int
        x: int | None
        clicked: bool = False
        zoomed: int = 0

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self._plot: Plot | None = None
        self._title = Text()
        self._flags = ""
        self._empty = ""
        self._cursor: int | None = None
        self._picture: Picture | None = None
        self._strips: list[Strip] | None = None
        self._drawn: Plot | None = None  # of which the picture is, in so much room
        self._room = Size()
        self._looks: Looks | None = None
        self._pointed: int | None = None

    def show(self, plot: Plot | None, *, flags: str = "", empty: str = "") -> None:
        """Draw a plot.

        flags: what is said at the right, beside how many spikes were cut.
        empty: what is said where there is nothing to draw.
        """
        self._plot = plot
        self._flags = flags
        self._empty = empty
        self._again()

    def point(self, x: int | None, title: Text) -> None:
        """Draw the title and the cursor; the curves stay as they are."""
        if (x, title) != (self._cursor, self._title):
            self._cursor = x
            self._title = title
            self._again()

    def on_resize(self) -> None:
        self._again()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strips = self._looks = None

    def _again(self) -> None:
        self._strips = None
        self.refresh()

    # -- drawing ---------------------------------------------------------------------------------------------
    def render_line(self, y: int) -> Strip:
        if self._strips is None:
            self._strips = self._lines()
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width)

    def _lines(self) -> list[Strip]:
        width, height = self.size
        if self._plot is not self._drawn or self._room != self.size:
            self._picture = draw(self._plot, width, height - 1) if self._plot else None
            self._drawn = self._plot
            self._room = self.size
        looks = self._looks = self._looks or Looks(self)
        cut = f"{self._picture.cut} beyond " if self._picture and self._picture.cut else ""
        flags = f" {cut}{self._flags}".rstrip()
        room = max(width - len(flags), 0)
        title = Strip(self._title.render(self.app.console), self._title.cell_len).adjust_cell_length(room)
        head = Strip([*title, Segment(flags[:width], looks["flags"])]).adjust_cell_length(width)
        head = head.apply_style(looks.base)
        if self._picture is None:
            said = Segment((" " * GUTTER + self._empty)[:width], looks["label"])
            return [head, Strip([]), Strip([said]).adjust_cell_length(width)]
        plot = self._plot
        x = self._cursor
        if plot is None or x is None or not plot.first <= x <= plot.last:
            return [head, *_body(self._picture, None, "", looks)]
        cell = GUTTER + self._picture.across(x) // 2
        return [head, *_body(self._picture, cell, x_text(plot.x, x), looks)]

    # -- the mouse -------------------------------------------------------------------------------------------
    def x_at(self, cell: int) -> int | None:
        """Return the x under a cell of this widget."""
        if self._picture is None or cell < GUTTER:
            return None
        return round(self._picture.across.value(2 * (cell - GUTTER) + 0.5))

    def on_mouse_move(self, event: events.MouseMove) -> None:
        x = self.x_at(event.x)
        if x != self._pointed:
            self._pointed = x
            self.post_message(self.Pointed(self.index, x))

    def on_leave(self) -> None:
        if self._pointed is not None:
            self._pointed = None
            self.post_message(self.Pointed(self.index, None))

    def on_click(self, event: events.Click) -> None:
        self.post_message(self.Pointed(self.index, self.x_at(event.x), clicked=True))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.post_message(self.Pointed(self.index, self.x_at(event.x), zoomed=-1))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.post_message(self.Pointed(self.index, self.x_at(event.x), zoomed=1))


class Looks(dict[str, Style]):
    """The styles of a picture, by name, in the theme of now."""

    def __init__(self, widget: Widget) -> None:
        super().__init__()
        self._ansi = widget.app.native_ansi_color
        *_, self._ground, self._fore = widget.colors
        self.base = Style(color=widget.rich_style.color, bgcolor=widget.rich_style.bgcolor)
        theme = widget.app.current_theme
        self.colors = _ANSI if self._ansi else DARK if theme.dark else LIGHT  # by place; MARKS has one, too
        self._faint = 0.55 if theme.dark else 0.5

    def __missing__(self, name: str) -> Style:
        place = int(name[-1]) if name[-1].isdigit() else 0
        color = self.colors[place % RUNS]
        match name.rstrip("0123456789"):
            case "run":
                look = Style(color=color)
            case "best":
                look = Style(color=color, bold=True)
            case "letter":
                look = Style(color=color, bold=True, reverse=True)
            case "ground":
                look = self._mixed(color, self._faint)
            case "mark":
                look = Style(color=self.colors[MARKS], bold=True)
            case "bad" | "cut":
                look = Style(color=self.colors[3], bold=True)
            case "cursor":
                look = Style(bold=True)
            case "grid":
                look = self._mixed("", 0.8)
            case "axis":
                look = self._mixed("", 0.65)
            case _:
                look = self._mixed("", 0.35)
        self[name] = style = self.base + look
        return style

    def _mixed(self, color: str, part: float) -> Style:
        """Mix a colour, or for "" that of the text, with a part of the background."""
        if self._ansi:
            return Style(color=color or "bright_black", dim=bool(color))
        base = Color.parse(color) if color else self._fore
        mixed = base.blend(self._ground, part)
        return Style(color=RichColor.from_rgb(mixed.r, mixed.g, mixed.b))


def _body(picture: Picture, cursor: int | None, label: str, looks: Looks) -> list[Strip]:
    """Make lines of the cells; the cursor is a column between them, its number among those of x below."""
    lines = []
    for chars, names in zip(picture.chars[:-1], picture.looks[:-1], strict=True):
        if cursor is not None and cursor < len(chars):
            chars = chars.copy()
            names = names.copy()
            if chars[cursor] in " ┈":
                chars[cursor] = "│"
            names[cursor] = "cursor"
        lines.append(_line(chars, names, looks))
    chars = picture.chars[-1].copy()
    names = picture.looks[-1].copy()
    if cursor is not None:
        label = f" {label} "
        start = min(max(cursor - len(label) // 2, 0), max(len(chars) - len(label), 0))
        while start and chars[start - 1].strip() and chars[start].strip():  # half a number is another one
            start -= 1
            label = f" {label}"
        for i, char in enumerate(label[: len(chars) - start]):
            chars[start + i] = char
            names[start + i] = "cursor"
        for i in range(start + len(label), len(chars)):
            if not chars[i].strip():
                break
            chars[i] = " "
    return [*lines, _line(chars, names, looks)]


def _line(chars: list[str], names: list[str], looks: Looks) -> Strip:
    segments = list[Segment]()
    text = "".join(chars)
    begin = 0
    before = names[0] if names else ""
    for at, name in enumerate(names):
        if name != before:
            segments.append(Segment(text[begin:at], looks[before]))
            begin = at
            before = name
    segments.append(Segment(text[begin:], looks[before]))
    return Strip(segments, len(chars))
