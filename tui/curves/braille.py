"""Dots on cells of 2 x 4, in Braille."""

from collections.abc import Iterator, Sequence

# Braille by the four dots of the left and of the right column, the top one lowest in each
_LEFT, _RIGHT = (0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80)
_GLYPHS = [
    chr(
        0x2800
        + sum(_LEFT[i] for i in range(4) if left >> i & 1)
        + sum(_RIGHT[i] for i in range(4) if right >> i & 1)
    )
    for left in range(16)
    for right in range(16)
]


class Canvas:
    """Columns of dots as whole numbers, bit 0 at the top."""

    def __init__(self, columns: int, dots: int) -> None:
        self.columns, self.dots = [0] * columns, dots

    def stroke(self, column: int, top: int, bottom: int) -> None:
        if top > bottom:
            top, bottom = bottom, top
        self.columns[column] |= ((2 << (bottom - top)) - 1) << top

    def strokes(
        self, at: Sequence[int], first: list[int], top: list[int], bottom: list[int], last: list[int]
    ) -> None:
        """Draw a vertical stroke in each column, and join the last point of one to the first point of the
        next.
        """
        columns, x0, y0 = self.columns, -1, 0
        for x, y, high, low, y1 in zip(at, first, top, bottom, last, strict=True):
            if x0 >= 0:
                if x > x0 + 1:
                    self.join(x0, y0, x, y)
                else:
                    middle = (y0 + y) // 2
                    self.stroke(x0, y0, middle)
                    high, low = min(high, middle), max(low, middle)
            columns[x] |= ((2 << (low - high)) - 1) << high
            x0, y0 = x, y1

    def join(self, x0: int, y0: int, x1: int, y1: int) -> None:
        """A line, half of each step in the column at either side of it."""
        slope, here = (y1 - y0) / max(x1 - x0, 1), y0
        for column in range(x0, x1):
            middle = y0 + round((column - x0 + 0.5) * slope)
            self.stroke(column, here, middle)
            here = middle
        self.stroke(x1, here, y1)

    def dash(self, pattern: str) -> None:
        for column in range(len(self.columns)):
            if pattern[column // 2 % len(pattern)] == "0":
                self.columns[column] = 0

    def cells(self) -> Iterator[tuple[int, int, str]]:
        """Row, cell and character of what is not empty."""
        for cell, (left, right) in enumerate(zip(self.columns[::2], self.columns[1::2], strict=True)):
            both = left | right
            row = ((both & -both).bit_length() - 1) // 4 if both else 0
            left, right = left >> 4 * row, right >> 4 * row
            while left or right:
                if here := (left & 15) << 4 | right & 15:
                    yield row, cell, _GLYPHS[here]
                left, right, row = left >> 4, right >> 4, row + 1
