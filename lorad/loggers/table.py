"""What daemon and logger process say to each other: whose journals to follow, what is done, and what fails.

See `lorad/protocol/tables.py`.
"""

from pathlib import Path
from typing import Any

from msgspec import Struct

from lorad.protocol import tables
from lorad.protocol.tables import LONGEST


class FollowedRun(Struct, frozen=True):
    """A run with loggers.

    Attributes:
        directory: Its directory.
        loggers: `loggers` of its spec.
        is_over: No attempt works on it now.
    """

    run: str
    directory: str
    loggers: list[Any]
    is_over: bool


class LoggersTable(Struct, frozen=True):
    """The runs whose journals are to be followed.

    Attributes:
        number: Another number whenever the rest changes.
        files: The directory for files of loggers that have no directory of their own.
    """

    number: int = 0
    files: str = ""
    runs: list[FollowedRun] = []


class Fault(Struct, frozen=True):
    """Something that a logger cannot do now, and tries again.

    Attributes:
        logger: Its name.
        says: What is wrong, as a sentence.
    """

    run: str
    logger: str
    says: str
    hint: str = ""


class State(Struct, frozen=True):
    """What the process has reached.

    Attributes:
        number: The number of the table that it goes by.
        done: Runs that are over and written as a whole.
    """

    number: int = 0
    done: list[str] = []
    faults: list[Fault] = []


def read_state(path: Path) -> State:
    """Read a state, which may be another user's file; an empty one where it cannot be read."""
    state = tables.read_state(path, State)
    short = [Fault(f.run, f.logger, f.says[:LONGEST], f.hint[:LONGEST]) for f in state.faults]
    return State(state.number, state.done, short)
