"""`python -m lorad.gateway HOME`: the gateway of a home, until SIGTERM. Exit code 1: it could not start.

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
    from lorad.errors import LoradError
    from lorad.gateway.server import serve
    from lorad.protocol.heartbeat import HEART
    from lorad.protocol.structs import learn_structs

_ROLES = ("", "front", "owner")


def main() -> int:
    home, role = [*sys.argv[1:], ""][:2] if len(sys.argv) in (2, 3) else ("", "?")
    if role not in _ROLES:
        print("usage: python -m lorad.gateway HOME [front|owner]", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if attempt := os.environ.get("LORAD_ATTEMPT"):
        HEART.start(AttemptDir(Path(attempt)).heartbeat)
    try:
        gateway = _gateway_of(Home(Path(home).absolute()), role)
        learn_structs()
        asyncio.run(serve(gateway))
    except (LoradError, OSError) as error:
        hint = f" {error.hint}" if isinstance(error, LoradError) and error.hint else ""
        print(f"the gateway could not start: {error}.{hint}", file=sys.stderr, flush=True)
        return 1
    return 0


def _gateway_of(home: Home, role: str) -> AbstractAsyncContextManager[object]:
    """The front never has a tokenizer or a template in it, and a user cannot read config.yaml of a shared
    home.
    """
    if role == "front":
        from lorad.gateway.shared.front import fronting

        return fronting(home, config.load(home.config).gateway)
    from lorad.gateway.own.app import answering, answering_as_owner

    return (
        answering_as_owner(home, os.getuid()) if role else answering(home, config.load(home.config).gateway)
    )


if __name__ == "__main__":
    sys.exit(main())
