"""The requests of a lane come in their order, each once, whatever the door drops meanwhile."""

import time
from pathlib import Path

import pytest

from lorad.tinker.lane.state import Inbox
from lorad.tinker.log import LogWriter
from lorad.tinker.records import Request, Unload


def write(log: LogWriter, *numbers: int) -> None:
    for seq in numbers:
        log.append(Request(seq, time.time(), str(seq), Unload()))


def taken(inbox: Inbox, count: int) -> list[int | None]:
    found = [inbox.next() for _ in range(count)]
    return [None if request is None else request.seq for request in found]


def test_requests_come_in_order_and_once(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as log:
        write(log, 2, 1, 1, 0, 4, 2)
        inbox = Inbox(tmp_path, -1)
        assert taken(inbox, 4) == [0, 1, 2, None]
        write(log, 3)
        assert taken(inbox, 3) == [3, 4, None]


def test_dropped_segments_are_passed_over(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment=1) as log:
        write(log, 0, 1)
        inbox = Inbox(tmp_path, -1)
        assert taken(inbox, 2) == [0, 1]
        write(log, 2, 3)
        log.drop(2)
        assert taken(inbox, 2) == [2, 3]


def test_waiting_begins_when_the_work_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long request the next one is looked for at once, and then more and more seldom."""
    clock, pauses = [0.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.sleep", pauses.append)
    with LogWriter(tmp_path) as log:
        write(log, 0)
        inbox = Inbox(tmp_path, -1)
        assert taken(inbox, 1) == [0]
        for clock[0] in (60.0, 62.0, 100.0):
            assert taken(inbox, 1) == [None]
    assert pauses == [0.002, 0.05, 0.2]
