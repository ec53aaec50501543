"""The log between the door and a lane: whole records, torn tails, segments; and requests in their order."""

import asyncio
import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorad.errors import Conflict, IntegrityError
from lorad.protocol import frames
from lorad.tinker.lane.state import Inbox
from lorad.tinker.log import LogWriter, follow, read
from lorad.tinker.records import Pass, Refused, Request, Step, Unload


def request(seq: int, arguments: Pass | Step | Refused | None = None) -> Request:
    return Request(seq, 1.5, "ab", arguments or Step(1e-3))


def seqs(directory: Path) -> list[int]:
    return [record.seq for record, _ in read(directory, Request)]


def test_arrays_come_back(tmp_path: Path) -> None:
    ids, ones = np.arange(4, dtype=np.int32), np.ones(4, np.float32)
    made = Pass(ids, np.array([1, 3], np.int32), ids + 1, "ppo", {"logprobs": ones}, {"beta": 0.1})
    with LogWriter(tmp_path / "log") as log:
        log.append(request(7, made))
    [(record, _)] = read(tmp_path / "log", Request)
    assert isinstance(record.arguments, Pass) and record.seq == 7
    np.testing.assert_array_equal(record.arguments.targets, ids + 1)
    assert record.arguments.arrays["logprobs"].dtype == np.float32


@pytest.mark.parametrize("cut", [1, 15, 40])
def test_a_torn_tail_is_cut(tmp_path: Path, cut: int) -> None:
    with LogWriter(tmp_path / "log") as log:
        for seq in (1, 2):
            log.append(request(seq))
    path = tmp_path / "log" / "00000000.log"
    os.truncate(path, path.stat().st_size - cut)
    assert seqs(tmp_path / "log") == [1]
    with LogWriter(tmp_path / "log") as log:
        log.append(request(3))
    assert seqs(tmp_path / "log") == [1, 3]


def test_zeros_of_a_power_cut_are_cut(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log") as log:
        log.append(request(1))
    path = tmp_path / "log" / "00000000.log"
    os.truncate(path, path.stat().st_size + 100)
    LogWriter(tmp_path / "log").close()
    assert seqs(tmp_path / "log") == [1]


def test_damage_before_other_records_is_refused(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log") as log:
        for seq in (1, 2):
            log.append(request(seq))
    path = tmp_path / "log" / "00000000.log"
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="damaged at byte 0"):
        seqs(tmp_path / "log")
    with pytest.raises(IntegrityError, match="damaged at byte 0"):
        LogWriter(tmp_path / "log")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log"), pytest.raises(Conflict, match="another process writes"):
        LogWriter(tmp_path / "log")
    LogWriter(tmp_path / "log").close()


def test_old_segments_are_dropped(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log", segment=1) as log:
        for seq in (2, 1, 3, 4):
            log.append(request(seq))
        log.drop(before=3)
        assert seqs(tmp_path / "log") == [3, 4]
        log.drop(before=9)
    assert seqs(tmp_path / "log") == [4]
    with LogWriter(tmp_path / "log", segment=1) as log:
        log.append(request(5))
    assert seqs(tmp_path / "log") == [4, 5]


def test_a_segment_may_go_while_read(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log", segment=1) as log:
        for seq in (1, 2, 3):
            log.append(request(seq))
        reading = read(tmp_path / "log", Request)
        assert next(reading)[0].seq == 1
        log.drop(before=3)  # 2 is listed, and gone when it is opened
        assert [record.seq for record, _ in reading] == [3]


async def test_a_follower_sees_what_comes(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log", segment=200) as log:
        log.append(request(1))
        seen = []

        async def watch() -> None:
            async for record, _ in follow(tmp_path / "log", Request):
                seen.append(record.seq)
                if record.seq == 6:
                    return

        task = asyncio.create_task(watch())
        for seq in range(2, 7):
            log.append(request(seq))
            await asyncio.sleep(0.01)
        await asyncio.wait_for(task, 5)
    assert seen == [1, 2, 3, 4, 5, 6] and len(list((tmp_path / "log").iterdir())) > 1


def test_a_full_disk_leaves_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LogWriter(tmp_path / "log") as log:
        log.append(request(1))
        write = os.write

        def half(descriptor: int, data: memoryview) -> int:
            if len(data) < 60:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data[: len(data) // 2])

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            log.append(request(2))
        monkeypatch.setattr(os, "write", write)
        log.append(request(2))
    assert seqs(tmp_path / "log") == [1, 2]


def test_nothing_follows_a_record_that_stays_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LogWriter(tmp_path / "log") as log:
        write = os.write

        def half(descriptor: int, data: memoryview) -> int:
            if len(data) < 60:
                raise OSError(errno.EIO, "Input/output error")
            return write(descriptor, data[: len(data) // 2])

        def fail(*_: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            patch.setattr(os, "ftruncate", fail)
            for seq in (1, 2):
                with pytest.raises(OSError, match="Input/output"):
                    log.append(request(seq))
        log.append(request(2))
    assert seqs(tmp_path / "log") == [2]


def test_what_was_not_synced_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log" / "00000000.log"
    with LogWriter(tmp_path / "log") as log:
        size = log.append(request(1))

        def fail(_: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            for seq in (2, 3):
                with pytest.raises(OSError, match="Input/output"):
                    log.append(request(seq))
        assert seqs(tmp_path / "log") == [1, 2]  # a follower has seen it
        on_disk = path.read_bytes()
        path.write_bytes(on_disk[:size] + bytes(len(on_disk) - size))
        log.append(request(3))
    assert seqs(tmp_path / "log") == [1, 2, 3]


def test_the_last_record_is_written_again_when_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LogWriter(tmp_path / "log") as log:
        size = log.append(request(1))
        last = log.append(request(2))
    written, write = [], os.pwrite

    def noted(descriptor: int, data: memoryview, offset: int) -> int:
        written.append((offset, len(data)))
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", noted)
    LogWriter(tmp_path / "log").close()
    assert written == [(size, last)] and seqs(tmp_path / "log") == [1, 2]


def test_records_of_before_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LogWriter(tmp_path / "log", segment=150) as log:
        for seq in (1, 2, 5, 3, 4, 6):
            log.append(request(seq))
    decoded, decode = [], frames.decode

    def noted(prefix: Any, body: bytes, kind: type[Request]) -> Request:
        decoded.append(decode(prefix, body, kind))
        return decoded[-1]

    monkeypatch.setattr(frames, "decode", noted)
    assert [record.seq for record, _ in read(tmp_path / "log", Request, after=3)] == [5, 4, 6]
    assert len(decoded) == 3


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
