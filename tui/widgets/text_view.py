"""Long texts in two columns or one, which are scrolled and never cut: folded once for a width, drawn line by
line.

The middle of blocks that have a name is hidden while there is little room, so that what follows is seen.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text
from textual.events import Resize
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from lorad.tui.actions.table import bindings

_MOST = 4  # characters to a cell of the width, at most: characters without width continue in the next line
_Piece = tuple[int, int]  # begin and end of a line
_BESIDE = 56  # cells from which on two columns stand side by side; below that one under the other
_BAR = " │ "
_LEAST = 3  # lines that are seen of a block with a name, at least
_SHARE = 6  # the part of the height that they have if that is more
_UNFOLD = "z"  # the key, as it is shown
TAB = "\N{EM SPACE} "  # stands for a tab; no other em space is in a text without control characters
_SIGNS = re.compile("[·→⏎]+")
Span = tuple[int, int, str]  # begin, end, style


def folded(text: str, width: int) -> Iterator[_Piece]:
    """Fold text at line ends and spaces, and within words that are longer than a line."""
    width = max(width, 2)
    start = 0
    while True:
        stop = text.find("\n", start)
        is_last = stop < 0
        if is_last:
            stop = len(text)
        while (end := start + _fitting(text[start : min(start + width * _MOST, stop)], width)) < stop:
            space = text.rfind(" ", start, end + 1)
            if space > start + width // 3:
                yield start, space
                start = space + 1
            else:
                yield start, end
                start = end
            if start >= stop:
                break
        else:
            yield start, stop
        if is_last:
            return
        start = stop + 1


def _fitting(text: str, width: int) -> int:
    """Return how many characters fit, at least one if there is one."""
    if text[:width].isascii():
        return min(len(text), width)
    low = 1  # so many fit
    high = len(text)  # more do not
    if cell_len(text) <= width:
        return len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cell_len(text[:middle]) <= width else (low, middle - 1)
    return low


class TextBlock(NamedTuple):
    """Text without control characters.

    Attributes:
        spans: The styles of parts, in order, none over another.
        key: What `mark` and `go` call the block.
        name: What a long block is called where its middle is hidden; "" where it is always whole.
        until: Where the part that counts ends; what follows, as the generation prompt does, is hidden, too.
        at: Where the block begins in the text of its key, of which it may be a part.
        short: One line that is shown instead while there is little room.
        made: Gives text and spans for a width instead.
    """

    text: str
    style: str = ""
    spans: Sequence[Span] = ()
    key: int | None = None
    name: str = ""
    until: int | None = None
    at: int = 0
    short: str = ""
    made: Callable[[int], tuple[str, Sequence[Span]]] | None = None


class TextSection(NamedTuple):
    """Blocks below each other; `right` stands beside `left` where there is room."""

    left: Sequence[TextBlock]
    right: Sequence[TextBlock] = ()


class _Fold(NamedTuple):
    block: TextBlock
    start: int
    end: int


_Folds = list[_Fold]
_EMPTY = _Fold(TextBlock(""), 0, 0)


class Reader(ScrollView, can_focus=True):
    """A text of sections, in whose blocks places can be marked and gone to."""

    BINDINGS = bindings("log")
    DEFAULT_CSS = """
    Reader { overflow-y: scroll; overflow-x: hidden; scrollbar-size-vertical: 1; padding: 0 1; }
    """

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._sections: Sequence[TextSection] = ()
        self._lines: list[tuple[_Fold, _Fold | None]] = []
        self._marks: Mapping[int, Sequence[Span]] = {}
        self._width = self._most = 0
        self.is_whole = False  # nothing is hidden
        self.shows_space = False  # blanks and line ends, of blocks that have a key

    # -- what is shown ---------------------------------------------------------------------------------------
    def show(self, sections: Sequence[TextSection], *, stay: bool = False) -> None:
        """Show sections from the beginning, or `stay` at the current position."""
        self._sections = sections
        self._marks = {}
        self._fold()
        if not stay:
            self.scroll_home(animate=False, immediate=True)

    def mark(self, marks: Mapping[int, Sequence[Span]]) -> None:
        """Draw these places of blocks in other styles, by their key."""
        if marks != self._marks:
            self._marks = marks
            self.refresh()

    def go(self, key: int, at: int) -> None:
        """Go to the line of a place in a block, and unfold everything if that line is hidden."""
        while True:
            for y, line in enumerate(self._lines):
                folds = [fold for fold in line if fold is not None and fold.block.key == key]
                if any(fold.start <= at - fold.block.at <= fold.end for fold in folds):
                    self.scroll_to_region(Region(0, y, 1, 1), animate=False, immediate=True, center=True)
                    return
            if self.is_whole:
                return
            self.unfold()

    def unfold(self) -> None:
        """Show all, or hide what is long again."""
        self.is_whole = not self.is_whole
        self._fold()

    def show_space(self, shown: bool) -> None:
        """Show where blanks, tabs and line ends are, or not."""
        self.shows_space = shown
        self._fold()

    @property
    def said(self) -> str:
        """Return the whole text, a line for each that is drawn."""
        return "\n".join(_BAR.join(self._plain(f) for f in line if f is not None) for line in self._lines)

    @property
    def _room(self) -> tuple[int, int]:
        """Return the cells of a line, and how many lines of a block with a name are seen.

        The last cell is for the sign of the line's end where that is shown.
        """
        width = max(self.scrollable_content_region.width - self.shows_space, 0)
        return width, max(_LEAST, self.size.height // _SHARE)

    # -- drawing ---------------------------------------------------------------------------------------------
    def on_resize(self, event: Resize) -> None:
        if self._room != (self._width, self._most):
            before = max(len(self._lines), 1)
            at = self.scroll_offset.y
            self._fold()
            self.scroll_to(y=at * len(self._lines) // before, animate=False, immediate=True)

    def _fold(self) -> None:
        self._width, self._most = self._room
        most = 0 if self.is_whole else self._most
        if not self._width:
            return  # it is laid out later
        lines = list[tuple[_Fold, _Fold | None]]()
        for section in self._sections:
            if section.right and self._width >= _BESIDE:
                half = (self._width - len(_BAR)) // 2
                left = _folds(section.left, half, most)
                right = _folds(section.right, half, most)
                lines += zip_longest(left, right, fillvalue=_EMPTY)
            else:
                lines += ((fold, None) for fold in _folds([*section.left, *section.right], self._width, most))
        self._lines = lines
        self.virtual_size = Size(self._width, len(lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        y += self.scroll_offset.y
        width = self._width
        if y >= len(self._lines):
            return Strip.blank(width, self.rich_style)
        left, right = self._lines[y]
        text = self._text(left)
        if right is not None:
            text.truncate(column := (width - len(_BAR)) // 2, pad=True)
            text.append(_BAR, "dim").append_text(self._text(right))
            text.truncate(column * 2 + len(_BAR))
        strip = Strip(text.render(self.app.console), text.cell_len)
        return strip.adjust_cell_length(width).apply_style(self.rich_style)

    def _text(self, fold: _Fold) -> Text:
        block, start, end = fold
        text = Text(plain := self._plain(fold), end="", no_wrap=True)
        text.stylize(block.style)  # as a span: Rich leaves the style of a text without spans out
        if len(plain) != end - start or plain != block.text[start:end]:
            for signs in _SIGNS.finditer(plain):
                text.stylize("dim", *signs.span())
        marks = self._marks.get(block.key, ()) if block.key is not None else ()
        for spans, at in ((block.spans, start), (marks, block.at + start)):
            for first, last, style in spans[max(bisect_left(spans, (at,)) - 1, 0) :]:
                if first >= at + end - start:
                    break
                text.stylize(style, max(first - at, 0), max(last - at, 0))
        return text

    def _plain(self, fold: _Fold) -> str:
        """Return a line as it is shown: each sign of a blank is as wide as the blank."""
        block, start, end = fold
        text = block.text[start:end]
        if not self.shows_space or block.key is None:
            return text.replace(TAB[0], " ")
        text = text.replace(TAB, "→\N{NO-BREAK SPACE}").replace(" ", "·").replace("\N{NO-BREAK SPACE}", " ")
        return text + "⏎" * (block.text[end : end + 1] == "\n")


def _folds(blocks: Sequence[TextBlock], width: int, most: int) -> _Folds:
    """Fold blocks for a width, those with a name to at most so many lines; 0: all.

    Such a block keeps its end, and its beginning where there is room for both: a question stands at the end
    of its prompt, a result at the end of its answer.
    """
    folds: _Folds = []
    for block in blocks:
        if block.made is not None:
            text, spans = block.made(width)
            block = block._replace(text=text, spans=spans, until=None)
        if block.short and most:
            short = TextBlock(block.short, block.style)
            folds += [_Fold(short, start, end) for start, end in folded(block.short, width)][:1]
            continue
        lines = [_Fold(block, start, end) for start, end in folded(block.text, width)]
        hidden = len(lines) - most
        if block.name and most and hidden > 1:
            first = (most - 1) // 2
            last = len(lines) if block.until is None else sum(line.start < block.until for line in lines)
            text = f"⋯ {hidden + 1} more lines of the {block.name}: {_UNFOLD}"[:width]
            ending = lines[max(last - (most - 1 - first), first) : last]
            lines = [*lines[:first], _Fold(TextBlock(text, "dim"), 0, len(text)), *ending]
        folds += lines
    return folds
