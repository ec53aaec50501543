"""Connections of SQLite that nobody closes are warnings, which fail a test, on every Python.

Python 3.13 and later say so themselves.
"""

import functools
import sqlite3
import sys
import warnings
from typing import Any


class Watched(sqlite3.Connection):
    """Warns when it is collected before it was closed."""

    is_open = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_open = True

    def close(self) -> None:
        super().close()
        self.is_open = False

    def __del__(self) -> None:
        if self.is_open:
            warnings.warn(f"nobody closed {self!r}", ResourceWarning, source=self, stacklevel=1)


def watch() -> None:
    """Open the connections of this process as watched ones."""
    if sys.version_info < (3, 13):
        sqlite3.connect = functools.partial(sqlite3.connect, factory=Watched)  # type: ignore[assignment]
