"""`python -m lorad.gateway HOME`: the gateway of a home, until SIGTERM. Exit code 1: it could not start."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from lorad import config
from lorad.errors import LoradError
from lorad.gateway.server import serve
from lorad.paths import Home
from lorad.protocol.structs import learn_structs


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m lorad.gateway HOME", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    learn_structs()
    try:
        home = Home(Path(sys.argv[1]).absolute())
        asyncio.run(serve(home, config.load(home.config).gateway))
    except (LoradError, OSError) as error:
        hint = f" {error.hint}" if isinstance(error, LoradError) and error.hint else ""
        print(f"the gateway could not start: {error}.{hint}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
