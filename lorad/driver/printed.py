"""What user code prints goes to the log of its run; of what it prints without an end, a part."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import IO

BURST, RATE = 4 << 20, 256 << 10  # bytes at once, and in a second
PART = 1 << 16
PAUSE_SECONDS = 0.001  # between parts that are left out: reading them all must not take a core


def pass_on(source: IO[bytes], target: int = 2) -> threading.Thread:
    """A thread that ends with `source`, which it closes. Who prints waits for a millisecond at most."""
    thread = threading.Thread(target=_pass_on, args=(source, target), name="printed", daemon=True)
    thread.start()
    return thread


def _pass_on(source: IO[bytes], target: int) -> None:
    room, looked, left_out = float(BURST), time.monotonic(), 0
    with source:
        while data := os.read(source.fileno(), PART):
            now = time.monotonic()
            room, looked = min(BURST, room + RATE * (now - looked)), now
            if len(data) > room:
                left_out += len(data)
                time.sleep(PAUSE_SECONDS)
                continue
            room -= len(data)
            left_out = _say(target, left_out)
            _write(target, data)
    _say(target, left_out)


def _say(target: int, left_out: int) -> int:
    """Write how many bytes were left out, if any; return 0, the new count."""
    if left_out:
        _write(target, f"\n[lorad] {left_out} bytes of what user code printed were left out here\n".encode())
    return 0


def _write(target: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk takes no log, and ends no run for it
        os.write(target, data)
