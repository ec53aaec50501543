"""What daemon and notifying process say to each other, see `lorad/box/tables.py`: what is to be delivered,
what is done, and what fails.
"""

from pathlib import Path

from msgspec import Struct

from lorad.box import tables
from lorad.box.tables import LONGEST
from lorad.spec.notify import Notify


class AlarmSaid(Struct, frozen=True):
    """An alarm, as `lorad.alarms` raises it."""

    level: str
    kind: str
    says: str


class Message(Struct, frozen=True, kw_only=True):
    """A notification, as a receiver gets it.

    id: the same in every try and for every receiver; a receiver that saw it may drop it.
    event: `start`, `end`, `failure`, `alarm` or `test`.
    at: Unix seconds at which it happened.
    text: all of it in one line.
    reward: mean of the last step. loss: of the last step, of a run that samples nothing.
    eval: the last evaluation's score.
    """

    id: str
    event: str
    at: float
    run: str
    text: str
    host: str = ""
    owner: str = ""
    state: str = ""
    reason: str | None = None
    detail: str = ""
    step: int = 0
    steps: int = 0
    attempt: int = 0
    version: int | None = None
    reward: float | None = None
    loss: float | None = None
    eval: float | None = None
    alarm: AlarmSaid | None = None


class Delivery(Struct, frozen=True):
    """A message for one receiver.

    key: no other delivery has it.
    cwd: the directory in which a command runs.
    """

    key: str
    to: Notify
    message: Message
    cwd: str = "/"


class Table(Struct, frozen=True):
    """What one process is to deliver."""

    deliveries: list[Delivery] = []


class Failed(Struct, frozen=True):
    """A delivery that did not succeed: says is a sentence."""

    key: str
    says: str


class State(Struct, frozen=True):
    """What the process has reached.

    done: keys of what was delivered.
    given_up: what is not tried again.
    faults: what failed and is tried again.
    """

    done: list[str] = []
    given_up: list[Failed] = []
    faults: list[Failed] = []


def read_state(path: Path) -> State:
    """Read it; an empty one when there is none that can be read. The file may be another user's."""
    state = tables.read_state(path, State)
    given_up, faults = (
        [Failed(f.key, f.says[:LONGEST]) for f in all_] for all_ in (state.given_up, state.faults)
    )
    return State(state.done, given_up, faults)
