"""What the end of a log says about why a child ended."""

from __future__ import annotations

import re

FAULT = re.compile(r"^(?>.*?(?:Error|Exception)\b).*:|[Oo]ut of memory|error: ", re.MULTILINE)
NOISE = re.compile(r"nanobind:|^ - leaked|resource_tracker|Ignore import error|Warning")


def cause(log_text: str) -> str:
    """Return what went wrong first in the end of a log:
    the traces of other processes that follow say less.
    """
    lines = [line for line in log_text.splitlines() if not NOISE.search(line)]
    first = next((number for number, line in enumerate(lines) if FAULT.search(line)), None)
    shown = lines[-3:] if first is None else lines[first : first + 3]
    return "its log: " + "\n".join(shown)
