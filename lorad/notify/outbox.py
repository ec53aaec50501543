"""Keeps the deliveries of the daemon: what to say of a run, to whom, and how often."""

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
from lorad.notify.table import AlarmFacts, Delivery, Message
from lorad.spec.notify import Notify

_FAILURES = ("failed", "lost", "attestation_failed")
OLDEST = 86400.0  # seconds after which an event is too old for a message
MOST = 20  # messages of one run in an hour about its ends and failures, and as many about starts and alarms
_HOUR = 3600.0
_WEEK = 604800.0
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
    """All deliveries that are not done yet, in one file with the last event that was looked at.

    cursor: the last event that was looked at.
    alarms: when an alarm of a run (`run/kind/receiver`) was last sent, in Unix seconds.
    sent: when messages of a run (`run/ends`, `run/others`) were made in the last hour.
    """

    cursor: int = 0
    pending: list[_Owned] = []
    alarms: dict[str, float] = {}
    sent: dict[str, list[float]] = {}


def load(path: Path) -> Outbox:
    """Read an outbox, empty where there is no file. Raises OSError, and ValueError for a damaged one."""
    try:
        return msgspec.json.decode(read_file(path, _BYTES), type=Outbox)
    except FileNotFoundError:
        return Outbox()


def save(path: Path, outbox: Outbox) -> None:
    """Put an outbox on disk. Raises OSError."""
    write_whole(path, msgspec.json.encode(outbox))


def event_of_move(data: dict[str, Any]) -> str:
    """Return which event a move of a run is: `start`, `end` or `failure`; "" for none of these."""
    if data.get("move") == "confirm":
        return "start"
    if data.get("move") != "end" or data.get("reason") == "imported":
        return ""
    return "failure" if data.get("reason") in _FAILURES else "end"


def message_of(event: str, at: float, facts: dict[str, Any], alarm: AlarmFacts | None = None) -> Message:
    """Make a message, with a text that says it in one line.

    facts: `run` and perhaps other fields of `Message`, where None is unknown.
    """
    fields = {key: value for key, value in facts.items() if value is not None}
    for key in ("reward", "loss", "eval"):
        if not math.isfinite(fields.get(key, 0.0)):
            fields.pop(key)
    fields["detail"] = " ".join(str(fields.get("detail", "")).split())[:_DETAIL]
    what = alarm.kind if alarm else event
    message = Message(
        id=f"{facts['run']}-{what}-{int(at * 1000)}",
        event=event,
        at=at,
        text="",
        host=socket.gethostname(),
        alarm=alarm,
        **fields,
    )
    run = message.run
    if alarm:
        text = f"{run}: {alarm.says}"
    elif event == "test":
        text = f"A trial of the notifications of {run}" if run else "A trial of notifications"
    elif event == "start":
        text = f"{run} started" + (f" again (attempt {message.attempt})" if message.attempt > 1 else "")
    else:
        how = _HOW.get(message.reason or "", "ended")
        where = f"at step {message.step} of {message.steps}" if message.steps else f"at step {message.step}"
        named = (("reward", message.reward), ("loss", message.loss), ("eval", message.eval))
        figures = "".join(f", {name} {value:.4g}" for name, value in named if value is not None)
        detail = f": {message.detail}" if message.detail and event == "failure" else ""
        text = f"{run} {how} {where}{figures}{detail}"
    return replace(message, text=text)


def with_messages(
    outbox: Outbox, uid: int, receivers: Sequence[Notify], messages: Iterable[Message], cwd: str
) -> tuple[Outbox, list[Message]]:
    """Add messages for the receivers that are to hear of them, as often as they may.

    Returns also the first message that is left out because a run had too many in an hour.
    """
    left_out = []
    for message in messages:
        due = [n for n, to in enumerate(receivers) if _is_due(outbox, to, n, message)]
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
    """Drop deliveries, and notes that are too old to matter."""
    return Outbox(
        outbox.cursor,
        [owned for owned in outbox.pending if owned.delivery.key not in keys],
        {key: at for key, at in outbox.alarms.items() if at > now - _WEEK},
        {key: at for key, at in outbox.sent.items() if at[-1] > now - _HOUR},
    )


def _is_due(outbox: Outbox, to: Notify, number: int, message: Message) -> bool:
    """Return whether a receiver is to hear of a message now.

    The event `end` includes failures, `alarm` only alarms of what is broken.
    """
    if message.alarm is None:
        is_chosen = message.event in to.events or (message.event == "failure" and "end" in to.events)
        key = f"{number}.{message.id}"
        return is_chosen and all(owned.delivery.key != key for owned in outbox.pending)
    if ("alarm" if message.alarm.level == "bad" else "look") not in to.events:
        return False
    last = outbox.alarms.get(_alarm_key(message, number))
    return last is None or not 0 <= message.at - last < to.every


def _alarm_key(message: Message, number: int) -> str:
    return f"{message.run}/{message.alarm.kind if message.alarm else ''}/{number}"


def trial(run: str, number: int, to: Notify, cwd: str, facts: dict[str, Any] | None = None) -> Delivery:
    """Make a trial for one receiver, of a run or, where that is "", of none."""
    now = time.time()
    message = message_of("test", now, {"run": run, **(facts or {})})
    return Delivery(f"{number}.{message.id}", to, message, cwd)
