"""A picture of the TUI as PNG, for whoever renders no SVG: drawn cell by cell with the font of matplotlib.

Braille and blocks are drawn as dots and boxes, which join as they do in a terminal.
"""

from functools import cache
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont
from rich.cells import cell_len
from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI
from textual.screen import Screen

_WIDTH, _HEIGHT, _SIZE, _EDGE = 9, 19, 15, 10  # of a cell, of the font, around the picture, in pixels
_COLOURS = 64
_FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
_BACK, _FRONT = (18, 18, 18), (224, 224, 224)
# the dots of U+2800 + bits: column and row of each bit
_DOTS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
_Box = tuple[float, float, float, float]
_Rgb = tuple[int, int, int]


def png(screen: Screen[object], path: Path) -> None:
    """Write what a screen shows."""
    rows = screen._compositor.render_strips()
    size = (screen.size.width * _WIDTH + 2 * _EDGE, screen.size.height * _HEIGHT + 2 * _EDGE)
    image = Image.new("RGB", size, _BACK)
    draw = ImageDraw.Draw(image)
    for y, row in enumerate(rows):
        x = 0
        for segment in row:
            for character in segment.text:
                _cell(draw, _EDGE + x * _WIDTH, _EDGE + y * _HEIGHT, character, segment)
                x += cell_len(character)
    image.quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def _cell(draw: ImageDraw.ImageDraw, x: int, y: int, character: str, segment: Segment) -> None:
    if not cell_len(character):  # it joins the one before
        return
    style = segment.style or Style()
    front, back = _rgb(style.color, _FRONT), _rgb(style.bgcolor, _BACK)
    if style.reverse:
        front, back = back, front
    if style.dim:
        front = _mixed(front, back)
    draw.rectangle((x, y, x + cell_len(character) * _WIDTH - 1, y + _HEIGHT - 1), fill=back)
    if boxes := _boxes(character):
        for left, top, right, bottom in boxes:
            box = (x + left * _WIDTH, y + top * _HEIGHT, x + right * _WIDTH - 1, y + bottom * _HEIGHT - 1)
            draw.rectangle(tuple(map(round, box)), fill=front)
    elif character.strip():
        draw.text((x, y + 1), character, font=_font(is_bold=bool(style.bold)), fill=front)
    if style.underline:
        draw.line((x, y + _HEIGHT - 2, x + _WIDTH - 1, y + _HEIGHT - 2), fill=front)


def _boxes(character: str) -> list[_Box]:
    """Return the boxes of a block or a braille character, in shares of its cell."""
    code = ord(character)
    if 0x2800 <= code <= 0x28FF:
        dots = [_DOTS[bit] for bit in range(8) if code >> bit & 1]
        return [((c + 0.3) / 2, (r + 0.3) / 4, (c + 0.75) / 2, (r + 0.75) / 4) for c, r in dots]
    if 0x2581 <= code <= 0x2588:
        return [(0, 1 - (code - 0x2580) / 8, 1, 1)]
    if 0x2589 <= code <= 0x258F:
        return [(0, 0, (0x2590 - code) / 8, 1)]
    return {"▀": [(0.0, 0.0, 1.0, 0.5)], "▔": [(0.0, 0.0, 1.0, 0.125)]}.get(character, [])


@cache
def _font(*, is_bold: bool) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_FONTS / f"DejaVuSansMono{'-Bold' * is_bold}.ttf", _SIZE)


def _rgb(colour: Color | None, default: _Rgb) -> _Rgb:
    if colour is None or colour.is_default:
        return default
    red, green, blue = colour.get_truecolor(DIMMED_MONOKAI)
    return red, green, blue


def _mixed(front: _Rgb, back: _Rgb) -> _Rgb:
    red, green, blue = ((one + other) // 2 for one, other in zip(front, back, strict=True))
    return red, green, blue
