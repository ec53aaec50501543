"""What the daemon reads of users' text takes time in proportion to its length, whatever stands in it."""

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorad.bounds import OVERRIDE_CHARACTERS, SPEC_BYTES
from lorad.children.process import cause
from lorad.daemon.api.verbs import logs
from lorad.daemon.process.causes import in_words_of
from lorad.daemon.runs.draws import axes_of
from lorad.daemon.runs.grid import split
from lorad.errors import LoradError, SpecError
from lorad.spec.secrets import refuse_secret_text
from lorad.spec.text import load_spec
from lorad.text import one_line


def _read_as_log(text: str) -> object:
    with tempfile.NamedTemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        return logs.read(Path(file.name), 0, SMALL * TIMES)


READERS: dict[str, Callable[[str], Any]] = {
    "secrets": lambda text: refuse_secret_text(text, "a.yaml"),
    "spec": lambda text: load_spec(f"name: '{text}'", source="a.yaml"),
    "grid": lambda text: list(split(text)),
    "diagnose": in_words_of,
    "cause": cause,
    "logs": _read_as_log,
    "words": one_line,
}
PIECES = [
    "x",
    "-eyJ",
    "eyJaaaaaaaaaa.",
    "bearer ",
    "a://b:",
    ".ghp_",
    "-----BEGIN ",
    '"',
    "[",
    ",",
    "NCCL ",
    "Error ",
    "Warning ",
    "WARNING",
]
PIECES += ["No space left on device ", "/dev/shm ", "Unable to allocate 1 ", f"{'y' * 16000}\n"]
SMALL, TIMES = 4000, 16


@pytest.mark.system(but="spec")
@pytest.mark.parametrize("reader", READERS)
def test_reading_text_takes_linear_time(reader: str) -> None:
    read = READERS[reader]
    for piece in PIECES:
        small = max(best(read, (piece * SMALL)[:SMALL]), 0.001)  # below that, the machine's own noise counts
        assert best(read, (piece * SMALL * TIMES)[: SMALL * TIMES], enough=40 * small) < 40 * small, piece


def best(read: Callable[[str], Any], text: str, enough: float = 0.0) -> float:
    """Seconds of CPU, of the quickest of several readings; of the first that is quick enough."""
    found = float("inf")
    for _ in range(5):
        began = time.thread_time()
        with contextlib.suppress(LoradError):
            read(text)
        found = min(found, time.thread_time() - began)
        if found < enough:
            break
    return found


def test_too_long_text_is_refused_unread() -> None:
    with pytest.raises(SpecError, match="larger than 256 KiB"):
        load_spec("-eyJ" * SPEC_BYTES, source="a.yaml")
    for read in (lambda text: axes_of([text]), lambda text: load_spec("", overrides=[text])):
        with pytest.raises(SpecError, match="characters, more than"):
            read(f"trainer.lr={'1,' * OVERRIDE_CHARACTERS}")
