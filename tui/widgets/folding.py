"""Text folded to a width, by cells: where each line of the screen begins and ends."""

from collections.abc import Iterator

from rich.cells import cell_len

_MOST = 4  # characters to a cell of the width, at most: characters without width continue in the next line
_Piece = tuple[int, int]  # begin and end of a line


def folded(text: str, width: int) -> Iterator[_Piece]:
    """Fold text at line ends and spaces, and within words that are longer than a line."""
    width = max(width, 2)
    start = 0
    while True:
        end = text.find("\n", start)
        stop = len(text) if end < 0 else end
        yield from _paragraph(text, start, stop, width)
        if end < 0:
            return
        start = end + 1


def _paragraph(text: str, start: int, stop: int, width: int) -> Iterator[_Piece]:
    while True:
        end = start + _fitting(text[start : min(start + width * _MOST, stop)], width)
        if end >= stop:
            yield start, stop
            return
        space = text.rfind(" ", start, end + 1)
        if space > start + width // 3:
            yield start, space
            start = space + 1
        else:
            yield start, end
            start = end
        if start >= stop:
            return


def _fitting(text: str, width: int) -> int:
    """Return how many characters fit, at least one if there is one."""
    if text[:width].isascii():
        return min(len(text), width)
    low, high = 1, len(text)  # so many fit, more do not
    if cell_len(text) <= width:
        return len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cell_len(text[:middle]) <= width else (low, middle - 1)
    return low
