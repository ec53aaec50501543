"""What is to be delivered, for the daemon: what to say of a run, to whom, and how often."""

import math
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lorad.files import read_file, write_whole
from lorad.notify.table import AlarmSaid, Delivery, Message
from lorad.spec.notify import Notify

_FAILURES = ("failed", "lost", "attestation_failed")
OLDEST = 86400.0  # seconds after which nobody is told any more of what happened
MOST = 20  # messages of one run in an hour: of its ends and failures, and as many of starts and alarms
_HOUR, _WEEK = 3600.0, 604800.0
_BYTES = 64 << 20
_DETAIL = 1000  # characters
_ENDS = ("end", "failure")
_HOW = {
    "completed": "completed",
    "stopped": "was stopped",
    "killed": "was killed",
    "failed": "failed",
    "lost": "was lost",
    "attestation_failed": "failed its attestation",
}


class _Owned(Struct, frozen=True):
    """A delivery for the process of one user."""

    uid: int
    delivery: Delivery


class Outbox(Struct, frozen=True):
    """All that is not delivered yet; one file, so that what was looked at and what came of it change at once.

    cursor: the last event that was looked at.
    alarms: when an alarm of a run (`run/kind/receiver`) was last sent, in Unix seconds.
    sent: when messages of a run (`run/ends`, `run/others`) were made in the last hour.
    """

    cursor: int = 0
    pending: list[_Owned] = []
    alarms: dict[str, float] = {}
    sent: dict[str, list[float]] = {}


def load(path: Path) -> Outbox:
    """Read it; an empty one when there is none. Raises OSError, and ValueError for a damaged one."""
    try:
        return msgspec.json.decode(read_file(path, _BYTES), type=Outbox)
    except FileNotFoundError:
        return Outbox()


def save(path: Path, outbox: Outbox) -> None:
    """Put it in place, on disk. Raises OSError."""
    write_whole(path, msgspec.json.encode(outbox))


def said_of_move(data: dict[str, Any]) -> str:
    """Return the event that a move of a run is: `start`, `end` or `failure`; "" for none of these."""
    if data.get("move") == "confirm":
        return "start"
    if data.get("move") != "end" or data.get("reason") == "imported":
        return ""
    return "failure" if data.get("reason") in _FAILURES else "end"


def message_of(event: str, at: float, facts: dict[str, Any], alarm: AlarmSaid | None = None) -> Message:
    """Make a message. facts: fields of `Message`, as far as they are known; `run` is."""
    known = {key: value for key, value in facts.items() if value is not None}
    for key in ("reward", "loss", "eval"):
        if not math.isfinite(known.get(key, 0.0)):
            known.pop(key)
    known["detail"] = " ".join(str(known.get("detail", "")).split())[:_DETAIL]
    what = alarm.kind if alarm else event
    made = Message(
        id=f"{facts['run']}-{what}-{int(at * 1000)}",
        event=event,
        at=at,
        text="",
        host=socket.gethostname(),
        alarm=alarm,
        **known,
    )
    return replace(made, text=_text(made))


def _text(said: Message) -> str:
    if said.alarm:
        return f"{said.run}: {said.alarm.says}"
    if said.event == "test":
        return f"A trial of the notifications of {said.run}" if said.run else "A trial of notifications"
    if said.event == "start":
        return f"{said.run} started" + (f" again (attempt {said.attempt})" if said.attempt > 1 else "")
    how = _HOW.get(said.reason or "", "ended")
    where = f"at step {said.step} of {said.steps}" if said.steps else f"at step {said.step}"
    named = (("reward", said.reward), ("loss", said.loss), ("eval", said.eval))
    figures = [f"{name} {value:.4g}" for name, value in named if value is not None]
    told = f": {said.detail}" if said.detail and said.event == "failure" else ""
    return f"{said.run} {how} {where}" + "".join(f", {one}" for one in figures) + told


def _wants(to: Notify, message: Message) -> bool:
    """Check whether a receiver is to hear of this: `end` includes failures, `alarm` only what is broken."""
    if message.alarm:
        return ("alarm" if message.alarm.level == "bad" else "look") in to.events
    return message.event in to.events or (message.event == "failure" and "end" in to.events)


def posted(
    outbox: Outbox, uid: int, receivers: Sequence[Notify], messages: Iterable[Message], cwd: str
) -> tuple[Outbox, list[Message]]:
    """Add messages for those who are to hear of them, as often as they may.

    Returns what is left out because there was too much in an hour as well: the first of it.
    """
    left_out = []
    for message in messages:
        due = [n for n, to in enumerate(receivers) if _wants(to, message) and _is_due(outbox, to, n, message)]
        if not due:
            continue
        key = f"{message.run}/{'ends' if message.event in _ENDS else 'others'}"
        sent = [at for at in outbox.sent.get(key, []) if abs(message.at - at) < _HOUR]
        if len(sent) > MOST:
            continue
        outbox = replace(outbox, sent=outbox.sent | {key: [*sent, message.at]})
        if len(sent) == MOST:
            left_out.append(message)
            continue
        new = [_Owned(uid, Delivery(f"{n}.{message.id}", receivers[n], message, cwd)) for n in due]
        alarms = outbox.alarms
        if message.alarm:
            alarms = alarms | {_alarm_key(message, n): message.at for n in due}
        outbox = replace(outbox, pending=[*outbox.pending, *new], alarms=alarms)
    return outbox, left_out


def without(outbox: Outbox, keys: set[str], now: float) -> Outbox:
    """Drop deliveries, and what is too old to matter."""
    return Outbox(
        outbox.cursor,
        [one for one in outbox.pending if one.delivery.key not in keys],
        {key: at for key, at in outbox.alarms.items() if at > now - _WEEK},
        {key: at for key, at in outbox.sent.items() if at[-1] > now - _HOUR},
    )


def _is_due(outbox: Outbox, to: Notify, number: int, message: Message) -> bool:
    if message.alarm is None:
        return f"{number}.{message.id}" not in {one.delivery.key for one in outbox.pending}
    last = outbox.alarms.get(_alarm_key(message, number))
    return last is None or not 0 <= message.at - last < to.every


def _alarm_key(message: Message, number: int) -> str:
    return f"{message.run}/{message.alarm.kind if message.alarm else ''}/{number}"


def trial(run: str, number: int, to: Notify, cwd: str, facts: dict[str, Any] | None = None) -> Delivery:
    """Make a trial for one receiver. run: its name; "" for none."""
    now = time.time()
    message = message_of("test", now, {"run": run, **(facts or {})})
    return Delivery(f"{number}.{message.id}", to, message, cwd)
