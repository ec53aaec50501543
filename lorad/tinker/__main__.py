"""`python -m lorad.tinker HOME`: the door of a home for the tinker client, until SIGTERM. Exit code 1: it
could not start.

`HOME front` and `HOME owner` are those of a home that several users share: see `shared/front.py`.
"""

import asyncio
import logging
import os
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from lorad.startup import quick_imports

with quick_imports():
    from lorad.box import config
    from lorad.box.paths import AttemptDir, Home
    from lorad.errors import LoradError, SpecError
    from lorad.gateway.server import serve
    from lorad.protocol.heartbeat import HEART
    from lorad.protocol.structs import learn_structs

_ROLES = ("", "front", "owner")
_PROTOBUF = "Install it: pip install 'lorad[tinker]'."


def main() -> int:
    home, role = [*sys.argv[1:], ""][:2] if len(sys.argv) in (2, 3) else ("", "?")
    if role not in _ROLES:
        print("usage: python -m lorad.tinker HOME [front|owner]", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if attempt := os.environ.get("LORAD_ATTEMPT"):
        HEART.start(AttemptDir(Path(attempt)).heartbeat)
    try:
        door = _door_of(Home(Path(home).absolute()), role)
        learn_structs()
        asyncio.run(serve(door))
    except (LoradError, OSError) as error:
        hint = f" {error.hint}" if isinstance(error, LoradError) and error.hint else ""
        print(f"the door could not start: {error}.{hint}", file=sys.stderr, flush=True)
        return 1
    return 0


def _door_of(home: Home, role: str) -> AbstractAsyncContextManager[object]:
    """The front has nothing of a model in it. Raises SpecError where protobuf is missing."""
    if role == "front":
        from lorad.tinker.shared.front import fronting

        return fronting(home, config.load(home.config).tinker)
    try:
        from lorad.tinker.door.app import answering, answering_as_owner
    except ModuleNotFoundError as error:
        raise SpecError(f"the door needs {error.name}, which is not installed", hint=_PROTOBUF) from None
    if role == "owner":
        return answering_as_owner(home, config.door_settings(), os.getuid())
    return answering(home, config.load(home.config).tinker)


if __name__ == "__main__":
    sys.exit(main())
