"""Commands on a pseudo-terminal, as a user's terminal would be."""

import contextlib
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from fcntl import ioctl

SECONDS = 60.0


# The terminal becomes the command's own, so that Ctrl-C reaches it; a shell's background job has that
# ignored.
BEGIN = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A command on a terminal of its own; `close` ends it."""

    def __init__(self, command: Sequence[str], width: int, environment: Mapping[str, str]) -> None:
        self._fd, theirs = pty.openpty()
        self.seen = ""
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        own = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEGIN, *command],
            stdin=theirs, stdout=theirs, stderr=theirs, env=own, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def until(self, *patterns: str) -> str:
        """Read until all patterns are found: what was seen since the last time."""
        deadline = time.monotonic() + SECONDS
        while not all(re.search(pattern, self.seen) for pattern in patterns):
            assert time.monotonic() < deadline, f"{patterns} never came: {self.seen!r}"
            if select.select([self._fd], [], [], 1.0)[0]:
                self._read()
        seen, self.seen = self.seen, ""
        return seen

    def end(self) -> tuple[str, int]:
        """What it says until it ends by itself, and its exit code."""
        with contextlib.suppress(OSError):  # how a terminal tells that nobody has it any more
            while self._read():
                pass
        os.close(self._fd)
        return self.seen, self.process.wait(SECONDS)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        os.close(self._fd)

    def _read(self) -> bytes:
        data = os.read(self._fd, 65536)
        self.seen += data.decode(errors="replace")
        return data


def on_terminal(command: Sequence[str], width: int, environment: Mapping[str, str]) -> str:
    """All that a command prints on a terminal of this width."""
    return Terminal(command, width, environment).end()[0]
