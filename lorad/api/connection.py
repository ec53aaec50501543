"""The connection of all handles: a client, and whether the daemon may be started."""

import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass

from lorad.client import launch
from lorad.client.client import Client
from lorad.errors import LoradError

given_up: ContextVar[threading.Event | None] = ContextVar("given_up", default=None)
"""An event that is set when nobody waits any longer for what this thread does."""


class _GivenUp(LoradError):
    """Nobody waits any longer."""


@dataclass(frozen=True)
class DaemonConnection:
    """The client that handles share. Threads may share it, too: each request has a socket of its own.

    start: whether a daemon that does not answer is started.
    """

    client: Client
    start: bool

    def revive(self, error: LoradError) -> None:
        """Start the daemon that went away. Raises `error` where it is not to be started."""
        if not self.start:
            raise error
        launch.start(self.client)


def rest(seconds: float) -> None:
    """Sleep between two looks. Raises an error as soon as nobody waits any longer."""
    event = given_up.get()
    if event is None:
        time.sleep(seconds)
    elif event.wait(seconds):
        raise _GivenUp("nobody waits any longer")
