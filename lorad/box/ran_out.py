"""Say that no file descriptor is left for the next connection, without filling the log."""

import asyncio
import logging
import math
import time
from typing import Any

log = logging.getLogger(__name__)

_SECONDS = 60.0  # between two words
_AGAIN = "._start_serving("  # asyncio's callback for the next try


class RanOut:
    """Says once a minute that no file descriptor is left for the next connection.

    As the handler of an asyncio loop's exceptions it says so in place of asyncio, which has a traceback for
    each try, hundreds a second, and for each that was still to come when the listener was closed.
    """

    def __init__(self) -> None:
        self._said_at = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context["message"] == "socket.accept() out of system resource":
            self.say(context["exception"])
        elif not (isinstance(context.get("exception"), ValueError) and _AGAIN in context["message"]):
            loop.default_exception_handler(context)

    def say(self, error: BaseException) -> None:
        if time.monotonic() - self._said_at >= _SECONDS:
            self._said_at = time.monotonic()
            log.warning("new connections wait: %s. Close some, or raise the limit (`ulimit -n`).", error)
