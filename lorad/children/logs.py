"""Reads the log of a child, which others append to and cut."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

# a line of a warning, or of something that a process survived: no sign of why it ended
SURVIVED = re.compile(
    r"^.{0,80}?(?<![^\s\[(])(?:DEBUG|INFO|WARNING)(?![^\s:\])])|^.{0,200}?Warning: |^\S{0,40}\[[IW]\d"
    r"|\b(?:can|could|may|might) (?:cause|lead to|result in)\b|micro-batches are halved"
)
_TAIL_BYTES = 65536


@dataclass
class Log:
    """Reads the log of a child, whose present life begins behind the first `began` bytes."""

    path: Path
    began: int = 0

    def size(self) -> int:
        """Return the length in bytes; 0 without a file."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def tail(self, lines: int = 15, since: int = 0) -> str:
        """Return the last non-empty lines of this life, behind the first `since` bytes; "" for none."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begin = max(self.began, since)
                # the daemon cuts what is too large
                file.seek(max(begin if begin <= size else 0, size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-lines:])
