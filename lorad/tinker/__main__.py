"""`python -m lorad.tinker HOME`: the door of a home for the tinker client, until SIGTERM. Exit code 1: it
could not start.
"""

import asyncio
import logging
import os
import sys
from pathlib import Path

from lorad.startup import quick_imports

with quick_imports():
    from lorad.box import config
    from lorad.box.paths import AttemptDir, Home
    from lorad.errors import LoradError, SpecError
    from lorad.gateway.server import serve
    from lorad.protocol.heartbeat import HEART
    from lorad.protocol.structs import learn_structs

_PROTOBUF = "Install it: pip install 'lorad[tinker]'."


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m lorad.tinker HOME", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if attempt := os.environ.get("LORAD_ATTEMPT"):
        HEART.start(AttemptDir(Path(attempt)).heartbeat)
    try:
        home = Home(Path(sys.argv[1]).absolute())
        settings = config.load(home.config).tinker
        try:
            from lorad.tinker.door.app import answering
        except ModuleNotFoundError as error:
            raise SpecError(f"the door needs {error.name}, which is not installed", hint=_PROTOBUF) from None
        learn_structs()
        asyncio.run(serve(answering(home, settings)))
    except (LoradError, OSError) as error:
        hint = f" {error.hint}" if isinstance(error, LoradError) and error.hint else ""
        print(f"the door could not start: {error}.{hint}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
