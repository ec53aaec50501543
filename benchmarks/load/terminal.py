"""A program in a pseudo-terminal, and when it wrote which bytes."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
import time
from pathlib import Path

COLUMNS, ROWS = 120, 36
SYNC_ASKED, SYNC_TOLD = b"\x1b[?2026$p", b"\x1b[?2026;2$y"  # whether frames may be marked; yes
FRAME = b"\x1b[?2026l"  # the end of one


class Terminal:
    """Starts it; `data` is all that it wrote, `stamps` the time and the length of `data` after
    each reading.
    """

    def __init__(self, argv: list[str], home: Path) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = os.environ | {
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "LORAD_HOME": str(home),
        }
        self._file = ours
        self.data = bytearray()
        self.stamps: list[tuple[float, int]] = []
        self._news = threading.Condition()
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def press(self, keys: str) -> float:
        """When that was."""
        now = time.perf_counter()
        os.write(self._file, keys.encode())
        return now

    def shown(self, words: bytes, since: int = 0, seconds: float = 20.0) -> float | None:
        """When the frame was complete that has these words, which begin at or after `since` in `data`; None:
        never.
        """
        deadline = time.perf_counter() + seconds
        with self._news:
            while (end := self._end_of_frame(words, since)) < 0:
                if not self._news.wait(deadline - time.perf_counter()):
                    return None
            return next(at for at, length in self.stamps if length >= end)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._file)

    def _end_of_frame(self, words: bytes, since: int) -> int:
        start = self.data.find(words, since)
        end = self.data.find(FRAME, start) if start >= 0 else -1
        return end + len(FRAME) if end >= 0 else -1

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: nobody is at the other end any more
            while chunk := os.read(self._file, 65536):
                now = time.perf_counter()
                if SYNC_ASKED in chunk:
                    os.write(self._file, SYNC_TOLD)
                with self._news:
                    self.data += chunk
                    self.stamps.append((now, len(self.data)))
                    self._news.notify_all()
