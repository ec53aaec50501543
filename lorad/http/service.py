"""Runs a service of a home as a process, which answers until SIGTERM."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from lorad.box.paths import AttemptDir, Home
from lorad.errors import LoradError
from lorad.protocol.heartbeat import HEART
from lorad.protocol.structs import learn_structs

log = logging.getLogger(__name__)

_ROLES = ("", "front", "owner")
_LOOP_SECONDS = 1.0  # between two signs of life of the event loop

Service = AbstractAsyncContextManager[object]


def run_service(name: str, module: str, service_of: Callable[[Home, str], Service]) -> int:
    """Run the service that the command line names, and return the exit code; 1 where it could not start.

    name: the name of the service in messages.
    service_of: makes the service of a home, and imports its modules. Where several users share the home, the
        role is "front" for the service that all ask, or "owner" for this user's own.
    """
    home, role = [*sys.argv[1:], ""][:2] if len(sys.argv) in (2, 3) else ("", "?")
    if role not in _ROLES:
        print(f"usage: python -m {module} HOME [front|owner]", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if attempt := os.environ.get("LORAD_ATTEMPT"):
        HEART.start(AttemptDir(Path(attempt)).heartbeat)
    try:
        service = service_of(Home(Path(home).absolute()), role)
        learn_structs()
        asyncio.run(_live(service))
    except (LoradError, OSError) as error:
        hint = f" {error.hint}" if isinstance(error, LoradError) and error.hint else ""
        print(f"{name} could not start: {error}.{hint}", file=sys.stderr, flush=True)
        return 1
    log.info("%s ends", name)
    return 0


async def _live(service: Service) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with service:
        while not stopping.is_set():
            HEART.looped()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _LOOP_SECONDS)
