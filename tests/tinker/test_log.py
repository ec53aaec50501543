"""The log between the door and a lane: whole records, torn tails, segments."""

import asyncio
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from lorad.errors import Conflict, IntegrityError
from lorad.tinker.log import LogWriter, follow, read
from lorad.tinker.records import Pass, Refused, Request, Step


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
            with pytest.raises(OSError, match="Input/output"):
                log.append(request(1))
        with pytest.raises(OSError, match="opened again"):
            log.append(request(2))
    with LogWriter(tmp_path / "log") as log:
        log.append(request(2))
    assert seqs(tmp_path / "log") == [2]


def test_after_a_failed_fsync_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LogWriter(tmp_path / "log") as log:

        def fail(_: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match="Input/output"):
                log.append(request(1))
        with pytest.raises(OSError, match="opened again"):
            log.append(request(2))
