"""What daemon and logger process say to each other, see `lorad/box/tables.py`: whose journals are to be
followed, what is done, and what fails.
"""

from pathlib import Path
from typing import Any

from msgspec import Struct

from lorad.box import tables
from lorad.box.tables import LONGEST


class Followed(Struct, frozen=True):
    """A run with loggers.

    directory: of the run.
    loggers: `loggers` of its spec.
    is_over: no attempt works on it now.
    """

    run: str
    directory: str
    loggers: list[Any]
    is_over: bool


class Table(Struct, frozen=True):
    """Whose journals are to be followed.

    number: another one whenever the rest changes.
    files: directory of the files of loggers without one of their own.
    """

    number: int = 0
    files: str = ""
    runs: list[Followed] = []


class Fault(Struct, frozen=True):
    """What a logger cannot do now, and tries again.

    logger: its name.
    says: what is wrong, as a sentence.
    """

    run: str
    logger: str
    says: str
    hint: str = ""


class State(Struct, frozen=True):
    """What the process has reached.

    number: that of the table that it goes by.
    done: runs that are over and written as a whole.
    """

    number: int = 0
    done: list[str] = []
    faults: list[Fault] = []


def read_state(path: Path) -> State:
    """Read it; an empty one when there is none that can be read. The file may be another user's."""
    state = tables.read_state(path, State)
    short = [Fault(f.run, f.logger, f.says[:LONGEST], f.hint[:LONGEST]) for f in state.faults]
    return State(state.number, state.done, short)
