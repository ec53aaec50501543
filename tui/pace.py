"""Limits how often something that takes long is asked for again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 20  # at most one part in so many of the time is spent on it


class Pace:
    """Makes a pause after each `asking` that is SHARE times as long."""

    def __init__(self) -> None:
        self._free = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._free

    @contextmanager
    def asking(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            now = time.monotonic()
            self._free = now + SHARE * (now - begun)
