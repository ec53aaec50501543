"""A terminal that a test types into and reads: tmux on a server of its own."""

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

TERM = "screen-256color"


class Terminal:
    """`command` in a pane of 120x40, as somebody has it open over SSH; all of it ends with the block."""

    def __init__(self, *command: str, env: Mapping[str, str], size: tuple[int, int] = (120, 40)) -> None:
        self._socket = f"lorad-{os.getpid()}-{time.monotonic_ns() % 10**9}"
        self._command, self._env, self._size = shlex.join(command), env, size

    def __enter__(self) -> Self:
        width, height = map(str, self._size)
        variables = [word for name, value in self._env.items() for word in ("-e", f"{name}={value}")]
        quiet = ("set", "-g", "default-terminal", TERM, ";", "set", "-g", "remain-on-exit", "on", ";")
        session = ("new-session", "-d", "-x", width, "-y", height, *variables, self._command)
        self.tmux("start-server", ";", *quiet, *session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.tmux("kill-server")

    def tmux(self, *words: str) -> str:
        command = ["tmux", "-L", self._socket, "-f", "/dev/null", *words]
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "TMUX")}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=30).stdout

    def press(self, *keys: str) -> None:
        """Keys as tmux calls them: Enter, Escape, C-p, j."""
        self.tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        self.tmux("send-keys", "-l", text)

    @property
    def text(self) -> str:
        return self.tmux("capture-pane", "-p")

    def line(self, word: str) -> str:
        """The first line with a word; "" where there is none."""
        return next((line for line in self.text.splitlines() if word in line), "")

    def until(self, *words: str, seconds: float = 45.0) -> str:
        """The text as soon as it has all of them."""

        def look() -> str:
            text = self.text  # each look is a process
            return text if all(word in text for word in words) else ""

        return self.wait(look, f"{words}", seconds)

    def gone(self, word: str) -> None:
        self.wait(lambda: word not in self.text and "gone", f"still there: {word}")

    def wait(self, look: Callable[[], str | bool], what: str, seconds: float = 45.0) -> str:
        deadline = time.monotonic() + seconds
        while not (found := look()):
            assert time.monotonic() < deadline, f"{what} is not what the terminal shows:\n{self.text}"
            time.sleep(0.1)
        return str(found)
