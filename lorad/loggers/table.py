"""What daemon and logger process say to each other, in two small files that are replaced as a whole.

`table.json` is the daemon's: whose journals are to be followed. `state.json` is the process's: what is done,
and what fails.
"""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lorad.files import read_file, write_whole

TABLE, STATE = "table.json", "state.json"
_BYTES = 16 << 20
_LONGEST = 500  # characters of what a trouble says


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


def read_table(path: Path) -> Table:
    """Read it; an empty one when there is none. Raises OSError, and ValueError for a damaged one."""
    try:
        return msgspec.json.decode(read_file(path, _BYTES), type=Table)
    except FileNotFoundError:
        return Table()


def read_state(path: Path) -> State:
    """Read it; an empty one when there is none that can be read. The file may be another user's."""
    try:
        state = msgspec.json.decode(read_file(path, _BYTES, links=False), type=State)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return State()
    short = [Fault(f.run, f.logger, f.says[:_LONGEST], f.hint[:_LONGEST]) for f in state.faults]
    return State(state.number, state.done, short)


def write(path: Path, data: Table | State, *, uid: int | None = None) -> None:
    """Put one in place. uid: whose the file is to be. Raises OSError."""
    mode = 0o600 if uid is None else 0o400
    write_whole(path, msgspec.json.encode(data), mode=mode, uid=uid, durable=False)
