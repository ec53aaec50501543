"""Deliver what `DIRECTORY/table.json` lists: `python -m lorad.notify DIRECTORY [STATE_DIRECTORY]`.

It runs until SIGTERM, and says in `state.json`, in the directory named second or in the same one, what became
of the deliveries.
"""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from lorad.startup import quick_imports

with quick_imports():
    from lorad.box.paths import AttemptDir
    from lorad.notify.courier import Courier
    from lorad.notify.table import NotifyTable, State, read_state
    from lorad.protocol.heartbeat import HEART
    from lorad.protocol.tables import STATE, TABLE, read_table, write

log = logging.getLogger("lorad.notify")

_LOOK_SECONDS = 0.5


async def serve(table_path: Path, state_path: Path) -> None:
    """Deliver until SIGTERM or SIGINT. A file that cannot be read or written waits."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    written = read_state(state_path)
    courier = Courier(written)
    table: NotifyTable | None = None
    while not stopped.is_set():
        try:
            newest = read_table(table_path, NotifyTable)
        except (OSError, ValueError) as error:
            log.error("%s: %s", table_path, error)
        else:
            if newest != table:
                table = newest
                courier.deliver_only(table.deliveries)
        written = _write(state_path, courier.state, written)
        waits = [asyncio.create_task(stopped.wait()), asyncio.create_task(courier.changed(_LOOK_SECONDS))]
        _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        HEART.looped()
    await courier.stop()
    _write(state_path, courier.state, written)


def _write(path: Path, state: State, written: State) -> State:
    """Write the state unless it is written, and return what is on disk."""
    if state == written:
        return written
    try:
        write(path, state)
    except OSError as error:
        log.error("%s: %s", path, error.strerror)
        return written
    return state


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: python -m lorad.notify DIRECTORY [STATE_DIRECTORY]", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if attempt := os.environ.get("LORAD_ATTEMPT"):
        HEART.start(AttemptDir(Path(attempt)).heartbeat)
    asyncio.run(serve(Path(sys.argv[1]) / TABLE, Path(sys.argv[-1]) / STATE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
