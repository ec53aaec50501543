"""The lines of a log that grows: as many as are kept, and those that a filter wants. No Textual here."""

from collections.abc import Iterable

from rich.cells import cell_len

from lorad.client.log_lines import Words, has_words, words
from lorad.text import printable

_MOST = 50_000  # lines that are kept, and a tenth more until the oldest go
_LONGEST = 4096  # characters of a line
LEVELS = {  # how a line of a level looks besides the words in it
    "error": ("✖", "bold red"),
    "warning": ("!", "yellow"),
    "debug": (" ", "dim"),
    "": (" ", ""),
}


def clean(text: str) -> str:
    """Remove from a program's output what a terminal would obey, except line breaks.

    Of a line that is overwritten (a progress bar) the last text counts, behind a carriage return as a mark.
    """
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        *before, last = line.rstrip("\r").split("\r")
        last = last if last.isprintable() else printable(last.expandtabs(8))
        lines.append(f"\r{last}" if before else last)
    return "\n".join(lines)


class LogLines:
    """The lines of a log.

    Attributes:
        shown: The lines that match the filter.
        width: The cells of the widest line that is shown, or more.
    """

    def __init__(self, most: int = _MOST) -> None:
        self.all: list[str] = []
        self.shown: list[str] = []
        self.words: Words = []
        self.width = 0
        self._most = most
        self._is_open = False  # the last line continues with the next text

    def clear(self) -> None:
        self.all.clear()
        self.shown.clear()
        self.width = 0
        self._is_open = False

    def add(self, text: str) -> int:
        """Add text as `clean` gives it, and return how many of the lines shown went from the front."""
        if not text:
            return 0
        first, *rest = text.split("\n")
        if self._is_open:
            before = self.all.pop()
            if self.shown and has_words(before, self.words):
                self.shown.pop()
            first = first[1:] if first.startswith("\r") else before + first
        lines = [first, *rest]
        self._is_open = lines[-1] != ""
        fresh = [line.removeprefix("\r")[:_LONGEST] for line in (lines if self._is_open else lines[:-1])]
        self.all += fresh
        self._show(fresh)
        if len(self.all) <= self._most * 1.1:
            return 0
        gone = self.all[: len(self.all) - self._most]
        del self.all[: len(gone)]
        hidden = sum(has_words(line, self.words) for line in gone) if self.words else len(gone)
        del self.shown[:hidden]
        return hidden

    def filter(self, text: str) -> None:
        self.words = words(text)
        self.shown = []
        self.width = 0
        self._show(self.all)

    def _show(self, lines: Iterable[str]) -> None:
        fresh = [line for line in lines if has_words(line, self.words)] if self.words else list(lines)
        self.shown += fresh
        widths = (len(line) if line.isascii() else cell_len(line) for line in fresh)
        self.width = max(self.width, max(widths, default=0))
