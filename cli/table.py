"""Tables for people: laid out for the width of the terminal, or tab-separated where there is none.

What is exact (names, numbers, states) is never cut. Where it is too much for the width, whole columns are
left out, by their `drop`, and names longer than a third of the width stand on a line of their own. Text comes
last where it fits, else on indented lines of its own, broken between words.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lorad.text import one_line, printable

_GAP = 2  # cells between two columns
_INDENT = 4  # cells before text on a line of its own
_NAME_LEAST = 16  # a name this long always has room in its column
_FIRST_LEAST = 8  # the column of names is no narrower
_TEXT_LEAST = 12  # with `single`: columns go until text has so much room, or a fifth of the width
_MOST_LINES = 2  # of a folded text under its row

_Kind = Literal["exact", "fold", "cut", "whole"]


class Column(NamedTuple):
    """A column.

    drop: with 0 it stays at any width; else the highest is left out first, and before it what is empty.
    kind: exact, or a text. `fold` is broken between words, at most MOST_LINES of it; `cut` has its middle
        left out; `whole`, such as a path, is neither. A text with a `drop` is left out where it does not fit
        beside the rest.
    """

    name: str
    drop: int = 0
    kind: _Kind = "exact"


Columns = Sequence[str | Column]


def columns(text: str) -> tuple[Column, ...]:
    """Read columns, such as `state, model 3, why fold, bases 2 cut`: each has a name, a drop and a kind."""
    parts = re.findall(r"(?:^|, )([^,]*?)(?: (\d+))?(?: (fold|cut|whole))?(?=, |$)", text)
    return tuple(Column(name, int(drop or 0), kind or "exact") for name, drop, kind in parts)


@dataclass(frozen=True)
class _Layout:
    """The columns that stand side by side, their widths, and the columns that have lines of their own."""

    beside: list[int]
    widths: dict[int, int]
    below: list[int]


def print_table(columns: Columns, rows: Iterable[Sequence[Any]], *, empty: str, single: bool = False) -> None:
    """Print a table on stdout.

    empty: a note for stderr when there are no rows.
    single: no row has a second line.
    """
    texts = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if texts:
        header, *lines = table_lines(columns, texts, terminal_width(), single=single)
        print(styled(header, "1"), *lines, sep="\n")
    elif empty:
        print(printable(empty), file=sys.stderr, flush=True)


def terminal_width() -> int | None:
    """Return how wide the terminal is that stdout is; None where it is none."""
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else None


def table_lines(
    columns: Columns, rows: Sequence[Sequence[str]], width: int | None, *, single: bool = False
) -> list[str]:
    """Return the header and all rows, whole and tab-separated where there is no width."""
    heads = [Column(column) if isinstance(column, str) else column for column in columns]
    texts = [[_plain(cell) for cell in row] for row in rows]
    if width is None:
        return ["\t".join(line) for line in ([head.name for head in heads], *texts)]
    layout = _laid_out(heads, texts, width, single=single)
    lines = _beside([head.name for head in heads], layout)[-1:]
    labelled = len(layout.below) > 1
    label = max((cells(heads[place].name) for place in layout.below), default=0) + _GAP if labelled else 0
    for row in texts:
        lines += _beside(row, layout)
        for place in layout.below:
            if row[place]:
                name = heads[place].name if labelled else ""
                for line in text_lines(row[place], heads[place].kind, max(width - _INDENT - label, 1)):
                    lines.append(f"{'':{_INDENT}}{name:<{label}}{line}")
                    name = ""
    return lines


def markdown_lines(columns: Columns, rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown, without its empty columns."""
    heads = [column if isinstance(column, str) else column.name for column in columns]
    kept = [place for place in range(len(heads)) if place == 0 or any(row[place] for row in rows)]
    lines = [heads, ["---"] * len(heads), *rows]
    return [
        "| " + " | ".join(_plain(line[place]).replace("|", "\\|") for place in kept) + " |" for line in lines
    ]


def _plain(cell: str) -> str:
    return cell if cell.isprintable() else one_line(cell)


def _laid_out(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, *, single: bool
) -> _Layout:
    needs = [
        max(cells(column.name), *(cells(row[place]) for row in rows)) for place, column in enumerate(columns)
    ]
    filled = [any(row[place] for row in rows) for place in range(len(columns))]
    texts = [place for place, column in enumerate(columns) if column.kind != "exact" and filled[place]]
    kept = [place for place, column in enumerate(columns) if column.kind == "exact"]
    least = {place: min(needs[place], max(_TEXT_LEAST, width // 5)) for place in texts if single}

    def room() -> int:
        return width + _GAP - sum(least.get(place, needs[place]) + _GAP for place in (*kept, *least))

    if room() < 0 and not single:
        needs[kept[0]] = min(needs[kept[0]], max(_NAME_LEAST, width // 3))
    # the columns that go first when there is no room
    order = {place: (not filled[place] and head.drop > 0, head.drop) for place, head in enumerate(columns)}
    while room() < 0 and columns[last := max((*kept, *least), key=order.__getitem__)].drop:
        if last in kept:
            kept.remove(last)
        else:
            least.pop(last)
    needs[kept[0]] = max(needs[kept[0]] + min(room(), 0), min(needs[kept[0]], _FIRST_LEAST))
    free = width - sum(needs[place] + _GAP for place in kept) + _GAP
    below = []
    for place in least if single else texts:  # beside the exact ones as long as there is room
        if single:
            needs[place] = max(min(needs[place], free - _GAP), 0)
        if needs[place] + _GAP <= free:
            kept.append(place)
            free -= needs[place] + _GAP
        elif not columns[place].drop:
            below.append(place)
    return _Layout(sorted(kept), {place: needs[place] for place in kept}, below)


def _beside(row: Sequence[str], layout: _Layout) -> list[str]:
    """Write the line of a row; before it the name alone, where that is longer than its column."""
    first, *others = layout.beside
    name = row[first]
    above = []
    if cells(name) > layout.widths[first]:
        above = [name]
        name = ""
    shown = [_padded(name, layout.widths[first])]
    for place in others:  # only with `single` can a cell be wider than its column
        width = layout.widths[place]
        shown.append(_padded(shortened(row[place], width), width))
    line = (" " * _GAP).join(shown).rstrip()
    return [*above, line] if line or not above else above


def text_lines(text: str, kind: _Kind, width: int) -> list[str]:
    """Return the lines of a text in so many cells; of a `cut` one the beginning and the end."""
    if kind == "whole":
        return [text]
    if kind == "cut":
        if cells(text) <= width:
            return [text]
        end = max((width - 1) // 3, 0)
        return [f"{_sized(text, max(width - 1 - end, 0)).rstrip()}…{_sized(text[::-1], end)[::-1].lstrip()}"]
    lines = _folded(text, width)
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], shortened(" ".join(lines[_MOST_LINES - 1 :]), width)]
    return lines


def _folded(text: str, width: int) -> list[str]:
    """Break text between words; a word longer than a line stays whole."""
    lines: list[str] = []
    for word in text.split():
        if lines and cells(lines[-1]) + 1 + cells(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines or [""]


def shortened(text: str, width: int) -> str:
    """Return the beginning of a text, in so many cells."""
    return text if cells(text) <= width else f"{_sized(text, max(width - 1, 0)).rstrip(' ,;')}…"


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print a line for each name and value; on a terminal long values are broken and indented."""
    width = terminal_width()
    label = 11
    for name, value in fields:
        for line in printable(value).splitlines() or [""]:
            for part in [line] if width is None else folded_as_is(line, max(width - label, 1)):
                print(f"{name:<{label}}{part}".rstrip())
                name = ""


def folded_as_is(line: str, width: int) -> list[str]:
    """Fold a line at its words; a line that fits keeps its spaces."""
    return [line] if cells(line) <= width else _folded(line, width)


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cells(text))


def cells(text: str) -> int:
    """Return how many cells a terminal needs for the text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _sized(text: str, width: int) -> str:
    if text.isascii():
        return text[:width]
    from rich.cells import set_cell_size

    return set_cell_size(text, width)


def styled(text: str, code: str) -> str:
    """Set text in bold ("1"), a colour or another code of SGR, where stdout is a terminal that can."""
    plain_terminal = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if plain_terminal or not code else f"\x1b[{code}m{text}\x1b[0m"
