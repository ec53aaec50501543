"""The messages of daemon and logger process: whose journals to follow, what is done, and what fails.

See `lorad/protocol/tables.py`.
"""

from pathlib import Path
from typing import Any

from msgspec import Struct

from lorad.protocol import tables
from lorad.protocol.tables import LONGEST


class FollowedRun(Struct, frozen=True):
    """A run with loggers."""

    run: str
    directory: str
    loggers: list[Any]  # as in its spec
    is_over: bool  # whether no attempt works on it now


class LoggersTable(Struct, frozen=True):
    """The runs whose journals are to be followed."""

    number: int = 0  # another one whenever the rest changes
    files: str = ""  # the directory for files of loggers whose settings name none
    runs: list[FollowedRun] = []


class Fault(Struct, frozen=True):
    """A failure of a logger, which it tries again; `says` is a sentence about it."""

    run: str
    logger: str
    says: str
    hint: str = ""


class State(Struct, frozen=True):
    """How far the process is."""

    number: int = 0  # of the table that it has read
    done: list[str] = []  # the runs that are over and written as a whole
    faults: list[Fault] = []


def read_state(path: Path) -> State:
    """Read a state, which may be another user's file; an empty one where it cannot be read."""
    state = tables.read_state(path, State)
    short = [Fault(f.run, f.logger, f.says[:LONGEST], f.hint[:LONGEST]) for f in state.faults]
    return State(state.number, state.done, short)
