"""The standard streams of a command: they are there, and take any text in any locale."""

import codecs
import contextlib
import json
import os
import sys
from io import TextIOWrapper

_ASCII = {
    **dict.fromkeys(map(chr, range(0x2500, 0x2580)), "+"),  # lines
    **dict.fromkeys("─━═┄┈╌╴╶", "-"),
    **dict.fromkeys("│┃║┆┊╎╵╷", "|"),
    **dict.fromkeys(map(chr, range(0x2580, 0x25A0)), "#"),  # blocks
    **dict.fromkeys(map(chr, range(0x2801, 0x2900)), "*"),  # dots of Braille, of which curves are made
    "\u2800": " ",
    "…": "...", "·": ".", "•": "*", "–": "-", "—": "-", "−": "-", "×": "x", "≈": "~", "±": "+-",
    "≤": "<=", "≥": ">=", "→": "->", "←": "<-", "↑": "^", "↓": "v", "✓": "+", "✗": "x",
    "★": "*", "●": "*", "○": "o", "◆": "*", "▲": "^", "▴": "^", "▼": "v", "▾": "v", "▶": ">",
    "’": "'", "“": "'", "”": "'",
}  # fmt: skip


def settle_streams() -> None:
    """Open closed standard streams on nothing, and have what an encoding lacks written in ASCII."""
    codecs.register_error("lorad", _written)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, before another file does
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="lorad")


def _written(error: UnicodeError) -> tuple[str, int]:
    """Write lines, arrows and the like in ASCII, and letters as `\\u00fc`, which is right in JSON too."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_ASCII.get(each) or json.dumps(each)[1:-1] for each in text), error.end


def takes_all(stream: object) -> bool:
    """Return whether a stream's encoding has every character."""
    return str(getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def give_up_streams() -> None:
    """Drop what a stream does not take, a full disk or a pipe that nobody reads, or Python tells it again."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            with contextlib.suppress(OSError):
                stream.flush()
