"""Who is to hear of what, and how often."""

from pathlib import Path

import pytest

from lorad.notify.outbox import MOST, Outbox, event_of_move, load, message_of, save, with_messages, without
from lorad.notify.table import AlarmFacts, Message
from lorad.spec.notify import Notify, Occasion

HOUR = 3600.0


def alarm(at: float, kind: str = "kl", level: str = "bad") -> Message:
    return message_of("alarm", at, {"run": "a"}, AlarmFacts(level, kind, "it is high"))


def heard(messages: list[Message], *events: Occasion, every: float = HOUR) -> list[str]:
    to = Notify(command=["x"], events=[*events], every=every)
    outbox, _ = with_messages(Outbox(), 0, [to], messages, "/")
    return [one.delivery.message.id for one in outbox.pending]


@pytest.mark.parametrize(
    ("events", "kinds"),
    [
        (["end"], ["end", "failure"]),
        (["failure"], ["failure"]),
        (["end", "failure"], ["end", "failure"]),
        (["start"], ["start"]),
        (["alarm"], ["kl"]),
        (["look"], ["truncation"]),
    ],
)
def test_receiver_hears_of_what_it_chose_once(events: list[Occasion], kinds: list[str]) -> None:
    moves = [message_of(event, 5.0, {"run": "a"}) for event in ("start", "end", "failure")]
    found = heard([*moves, alarm(5.0), alarm(5.0, "truncation", "look")], *events)
    assert found == [f"a-{kind}-5000" for kind in kinds]


def test_flapping_alarm_is_sent_once_in_a_while() -> None:
    assert len(heard([alarm(60.0 * minute) for minute in range(61)], "alarm")) == 2
    assert len(heard([alarm(60.0 * minute) for minute in range(61)], "alarm", every=600)) == 7
    assert len(heard([alarm(1.0), alarm(2.0, "stall")], "alarm")) == 2


def test_next_daemon_knows_which_alarms_were_sent(tmp_path: Path) -> None:
    receivers = [Notify(command=["x"])]
    outbox, _ = with_messages(Outbox(), 0, receivers, [alarm(10.0)], "/")
    outbox = without(outbox, {outbox.pending[0].delivery.key}, 11.0)
    save(tmp_path / "outbox.json", outbox)
    again, _ = with_messages(load(tmp_path / "outbox.json"), 0, receivers, [alarm(20.0)], "/")
    assert outbox.pending == again.pending == []


def test_messages_of_an_hour_are_bounded() -> None:
    starts = [message_of("start", float(second), {"run": "a"}) for second in range(MOST + 5)]
    end = message_of("failure", 50.0, {"run": "a", "reason": "lost"})
    receivers = [Notify(command=["x"], events=["start", "failure"])]
    outbox, left_out = with_messages(Outbox(), 0, receivers, [*starts, end], "/")
    assert len(outbox.pending) == MOST + 1 and outbox.pending[-1].delivery.message == end
    assert left_out == [starts[MOST]]  # said once
    later = message_of("start", 2 * HOUR, {"run": "a"})
    assert len(with_messages(outbox, 0, receivers, [later], "/")[0].pending) == MOST + 2
    before = message_of("start", -2 * HOUR, {"run": "a"})  # the clock was ahead, and was set right
    assert len(with_messages(outbox, 0, receivers, [before], "/")[0].pending) == MOST + 2


def test_moves_are_starts_ends_and_failures() -> None:
    assert event_of_move({"move": "confirm"}) == "start"
    assert event_of_move({"move": "end", "reason": "killed"}) == "end"
    assert event_of_move({"move": "end", "reason": "lost"}) == "failure"
    assert [event_of_move({"move": move}) for move in ("place", "stop", "pause", "resume")] == [""] * 4
    assert event_of_move({"move": "end", "reason": "imported"}) == ""


def test_message_is_one_line_of_finite_numbers() -> None:
    facts = {"run": "a", "reason": "failed", "detail": "a\nb", "step": 3, "steps": 9, "reward": float("nan")}
    message = message_of("failure", 1.0, facts)
    assert message.text == "a failed at step 3 of 9: a b" and message.reward is None
