"""How a process shows that it lives and progresses: a thread overwrites a small file every two seconds.

The file's time shows whether the process is scheduled at all, `progress` whether what it is `doing` gets
anywhere. A process does nothing while it waits for another one that is judged by its own beats, or for a
time-out: so a slow machine never makes it look stalled.
"""

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

DUMP = signal.SIGUSR1
"""Each rank answers it with the stacks of its threads, on stderr."""
BEAT_SECONDS = 2.0
_LEAST_SECONDS = 0.5  # between two beats
BYTES = 256  # overwritten in place: a full disk stops no heart
_WORDS = 60  # characters
_HOW_FAR = re.compile(r" \d+ of \d+")
LOOP_SECONDS = 10.0  # after which an event loop that does not come round is busy with something


class Beat(Struct, frozen=True):
    """The last sign of life of a process.

    at: Unix time.
    progress: a number that grows while everything that is being done progresses.
    doing: what it is doing; "" while it has nothing to do.
    words: the same for people, and how far it is: "sampling 41 of 64"; "" where it says nothing.
    """

    at: float
    progress: int
    doing: str
    words: str = ""


class Heart:
    """Beats in a thread from `start` to `stop`, or to the end of the process; threads say what they do.

    A thread that hangs is not hidden by another one: `progress` grows when all busy threads have got on since
    it grew last.
    """

    def __init__(self) -> None:
        self._doing: dict[int, str] = {}  # thread -> what it does
        self._got_on: dict[int, float] = {}
        self._looped: float | None = None
        self._words = ""
        self._progress = 0
        self._counted = 0.0
        self._stopped = threading.Event()
        self._is_news = threading.Event()

    def start(self, path: Path) -> None:
        """Begin to beat. Where no beat can be written, the process is judged by its life alone."""
        threading.Thread(target=self._beat, args=(path,), name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        self._is_news.set()

    def work(self, doing: str) -> None:
        """Note that this thread has finished something and does `doing` next; "" for nothing."""
        me = threading.get_ident()
        self._got_on[me] = time.monotonic()
        self._doing[me] = doing

    def progress(self) -> None:
        """Note that this thread has finished a part of what it is doing."""
        self._got_on[threading.get_ident()] = time.monotonic()

    def tell(self, words: str) -> None:
        """Say for people what the process is doing and how far it is, as in "sampling 41 of 64"."""
        before = self._words
        self._words = words
        if phase(before) != phase(words):
            self._is_news.set()

    @contextlib.contextmanager
    def tells(self, words: str) -> Iterator[None]:
        """Say for people what the process does within the block, until it says more there."""
        self.tell(words)
        try:
            yield
        finally:
            self.tell("")

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Count this thread as idle within the block: it waits for another's beats, or a time-out."""
        before = self._doing.get(threading.get_ident(), "")
        self.work("")
        try:
            yield
        finally:
            self.work(before)

    def looped(self) -> None:
        """Note that the event loop comes round; once noted, it must be noted again and again."""
        self._looped = time.monotonic()

    def beat(self) -> Beat:
        """Make a beat and count progress. A thread that ended is not busy any more."""
        threads = {thread.ident for thread in threading.enumerate()}
        now = time.monotonic()
        busy = {who: doing for who, doing in list(self._doing.items()) if doing and who in threads}
        if self._looped is not None and now - self._looped > LOOP_SECONDS:
            return Beat(time.time(), self._progress, "one turn of its event loop", self._words)
        if all(self._got_on[who] > self._counted for who in busy):
            self._progress = self._progress + 1
            self._counted = now
        last = min(busy, key=self._got_on.__getitem__, default=None)
        return Beat(time.time(), self._progress, "" if last is None else busy[last], self._words)

    def _beat(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return
        while True:
            with contextlib.suppress(OSError):
                os.pwrite(fd, self._line(), 0)
            if self._stopped.wait(_LEAST_SECONDS):
                os.close(fd)
                return
            self._is_news.wait(BEAT_SECONDS - _LEAST_SECONDS)
            self._is_news.clear()

    def _line(self) -> bytes:
        beat = self.beat()
        fields: dict[str, Any] = {"at": beat.at, "progress": beat.progress, "doing": beat.doing[:100]}
        line = json.dumps(fields | {"words": beat.words[:_WORDS]}).encode()
        if len(line) >= BYTES:  # many escapes: whether it progresses matters more than the words
            line = json.dumps(fields).encode()
        return line[: BYTES - 1].ljust(BYTES - 1) + b"\n"


HEART = Heart()
"""The heart of this process; it beats once it is started with a path."""
Tell = Callable[[str], None]
"""Says for people what is being done."""


class Count:
    """Says how many samples of a call have ended, in any thread: "sampling 41 of 64, 812 tok/s"."""

    def __init__(self, verb: str, total: int, tell: Tell = HEART.tell) -> None:
        self._verb = verb
        self._total = total
        self._tell = tell
        self._ended = self._tokens = 0
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self.add()

    def add(self, *, ended: int = 0, tokens: int = 0) -> None:
        """Count what ended or came."""
        with self._lock:
            self._ended = self._ended + ended
            self._tokens = self._tokens + tokens
            seconds = time.monotonic() - self._began
            rate = f", {self._tokens / seconds:.0f} tok/s" if self._tokens and seconds >= 1 else ""
            self._tell(f"{self._verb} {self._ended} of {self._total}{rate}")


def phase(words: str) -> str:
    """Return what is being done, of words that may also say how far it is."""
    return _HOW_FAR.split(words, 1)[0]


def read_beat(path: Path) -> Beat | None:
    """Read the last beat; None when none can be read. The file may be another user's: it is not trusted."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            beat = json.loads(os.read(fd, BYTES))
        finally:
            os.close(fd)
        at = float(beat["at"])
        progress = int(beat["progress"])
        doing = str(beat["doing"])
        words = " ".join(str(beat.get("words", "")).split())[:_WORDS]  # an older lorad says none
        return Beat(at, progress, doing, words)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
