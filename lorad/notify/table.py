"""What the daemon and the notifying process say to each other, by `lorad/protocol/tables.py`."""

from pathlib import Path

from msgspec import Struct

from lorad.protocol import tables
from lorad.protocol.tables import LONGEST
from lorad.spec.notify import Notify


class Undelivered(Exception):
    """A receiver did not take a notification; the message is a sentence without a secret.

    wait: seconds in which the receiver wants no other try.
    """

    def __init__(self, says: str, wait: float = 0.0) -> None:
        super().__init__(says)
        self.wait = wait


class AlarmFacts(Struct, frozen=True):
    """An alarm, as `lorad.alarms` raises it."""

    level: str
    kind: str
    says: str


class Message(Struct, frozen=True, kw_only=True):
    """A notification, as a receiver gets it.

    id: the same in every try and for every receiver; a receiver that saw it may drop it.
    event: `start`, `end`, `failure`, `alarm` or `test`.
    at: when it happened, in Unix seconds.
    text: the whole message in one line.
    reward: the last step's mean.
    loss: the last step's loss, where the run samples nothing.
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
    alarm: AlarmFacts | None = None

    @property
    def title(self) -> str:
        """Name the run and what happened to it."""
        return " ".join(filter(None, ("lorad:", self.run, self.event)))


class Delivery(Struct, frozen=True):
    """A message for one receiver.

    key: no other delivery has it.
    cwd: the directory in which a command runs.
    """

    key: str
    to: Notify
    message: Message
    cwd: str = "/"


class NotifyTable(Struct, frozen=True):
    """The deliveries of one process."""

    deliveries: list[Delivery] = []


class Failed(Struct, frozen=True):
    """A delivery that did not succeed, with the reason as a sentence."""

    key: str
    says: str


class State(Struct, frozen=True):
    """What the process has reached.

    done: the keys of what was delivered.
    given_up: deliveries that are not tried again.
    faults: deliveries that failed and are tried again.
    """

    done: list[str] = []
    given_up: list[Failed] = []
    faults: list[Failed] = []


def read_state(path: Path) -> State:
    """Read a state, which may be another user's file; an empty one where it cannot be read."""
    state = tables.read_state(path, State)
    given_up = [Failed(failed.key, failed.says[:LONGEST]) for failed in state.given_up]
    faults = [Failed(failed.key, failed.says[:LONGEST]) for failed in state.faults]
    return State(state.done, given_up, faults)
