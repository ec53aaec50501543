"""Report what a check is doing, while somebody waits for it."""

import contextlib
import os
import threading
from collections.abc import Iterator

import msgspec

from lorad.protocol.heartbeat import HEART
from lorad.protocol.preflight import PreflightLine

_SECONDS = 1.0  # between two lines


@contextlib.contextmanager
def telling(answers: int) -> Iterator[None]:
    """Within the block, write a line to `answers` whenever the check has got on."""
    ended = threading.Event()
    HEART.work("check")

    def tell() -> None:
        progress = 0
        while not ended.wait(_SECONDS):
            beat = HEART.beat()
            if beat.progress != progress:
                progress = beat.progress
                os.write(answers, msgspec.json.encode(PreflightLine(doing=beat.words)) + b"\n")

    thread = threading.Thread(target=tell, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        HEART.work("")


def begin(words: str) -> None:
    """Say what the check does next; what it did before is done."""
    HEART.tell(words)
    HEART.progress()
