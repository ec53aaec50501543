"""Writes figures of the runs in `DIRECTORY/table.json` to their loggers: `python -m lorad.loggers DIRECTORY`.

It runs until SIGTERM, and writes to `state.json`, in DIRECTORY or a second one, how far it is. It exits with
1 when it could not start.
"""

import logging
import os
import signal
import sys
import threading
from pathlib import Path

from lorad.startup import quick_imports

with quick_imports():
    from lorad.box.paths import AttemptDir
    from lorad.errors import SpecError
    from lorad.loggers.choose import LoggerChoice, choices
    from lorad.loggers.sink import Sink
    from lorad.loggers.table import FollowedRun, LoggersTable, State
    from lorad.protocol.heartbeat import HEART
    from lorad.protocol.tables import STATE, TABLE, read_table, write

log = logging.getLogger("lorad.loggers")

_LOOK_SECONDS = 1.0
_STOP_SECONDS = 20.0  # for sinks to finish what they write; the next life repeats the rest


class _Process:
    """The sinks of all loggers."""

    def __init__(self, table: Path, state: Path) -> None:
        self._table_path = table
        self._state_path = state
        self._table = LoggersTable()
        self._state = State(-1)
        self._sinks: dict[str, Sink] = {}

    def look(self) -> None:
        """Give each run of the table to the sinks of its loggers, and write how far they are.

        A file that cannot be read or written is tried again with the next call.
        """
        try:
            table = read_table(self._table_path, LoggersTable)
        except (OSError, ValueError) as error:
            log.error("%s: %s", self._table_path, error)
            return
        if table != self._table:
            self._table = table
            runs: dict[str, list[FollowedRun]] = {}
            for run in table.runs:
                for choice in _choices_of(run):
                    if choice.id not in self._sinks:
                        self._sinks[choice.id] = Sink(choice, Path(table.files).expanduser())
                    runs.setdefault(choice.id, []).append(run)
            for name, sink in self._sinks.items():
                sink.follow(runs.get(name, []))
        done = [
            run.run
            for run in table.runs
            if run.is_over and all(self._sinks[choice.id].is_done(run) for choice in _choices_of(run))
        ]
        state = State(table.number, done, [f for sink in self._sinks.values() for f in sink.faults])
        if state != self._state:
            try:
                write(self._state_path, state)
            except OSError as error:
                log.error("%s: %s", self._state_path, error.strerror)
            else:
                self._state = state

    def stop(self) -> None:
        for sink in self._sinks.values():
            sink.stop()
        for sink in self._sinks.values():
            sink.join(_STOP_SECONDS)


def _choices_of(run: FollowedRun) -> list[LoggerChoice]:
    """List the loggers of a run; the preflight has refused wrong ones."""
    try:
        return choices(run.loggers)
    except SpecError as error:
        log.error("%s: %s", run.run, error)
        return []


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: python -m lorad.loggers DIRECTORY [STATE_DIRECTORY]", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if attempt := os.environ.get("LORAD_ATTEMPT"):
        HEART.start(AttemptDir(Path(attempt)).heartbeat)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    process = _Process(Path(sys.argv[1]) / TABLE, Path(sys.argv[-1]) / STATE)
    while True:
        process.look()
        if stopped.wait(_LOOK_SECONDS):
            break
    process.stop()
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # a library's threads that still wait for a server keep nobody
