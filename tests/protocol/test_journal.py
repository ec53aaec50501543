"""The journal: what was written is read, what is torn or damaged is not, and one process writes."""

import errno
import math
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lorad.errors import Conflict, IntegrityError
from lorad.protocol.journal import JournalWriter, Record, decode, encode, lineage, read
from tests.kit.journals import begin, records_of, step, whole_run

WRITE_FOR_EVER = """
import sys
from pathlib import Path
from lorad.protocol.journal import JournalWriter
writer = JournalWriter(Path(sys.argv[1]), "sorter", 1)
for step in range(1, 10**9):
    print(writer.append("step", step, {"text": "x" * 300}).seq, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def write(path: Path, steps: int) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        for number in range(1, steps + 1):
            step(writer, number)


def test_appended_records_are_read_in_order(path: Path) -> None:
    write(path, 3)
    found = list(read(path))
    assert [(record.seq, record.step, record.kind) for record, _ in found] == [
        (n, n, "step") for n in (1, 2, 3)
    ]
    assert found[-1][1] == path.stat().st_size
    assert [record for record, _ in read(path, found[0][1])] == [record for record, _ in found[1:]]


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -0.0, 1e300, 5e-324, 0.1, 1e16, 2**63, "\n\u2028\0é😀", None]
)
def test_every_writable_value_can_be_read(path: Path, value: object) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        writer.append("warning", 0, {"message": value})
    (record,) = records_of(path)
    wrote_nothing = isinstance(value, float) and not math.isfinite(value)  # JSON has no NaN: it reads as None
    assert record.data["message"] == (None if wrote_nothing else value)


def test_torn_tail_is_skipped_and_then_cut(path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        for message in ("hot", "hotter"):
            writer.append("warning", 0, {"message": message})
    whole, ends = path.read_bytes(), [0] + [end for _, end in read(path)]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        left = sum(end <= size for end in ends) - 1
        assert [record.seq for record in records_of(path)] == list(range(1, left + 1))
        JournalWriter(path, "sorter", 1).close()
        assert path.stat().st_size == ends[left]


def test_numbers_continue_after_a_torn_tail(path: Path) -> None:
    write(path, 2)
    with path.open("ab") as file:
        file.write(b'{"v":1,"seq":3,"run"')
    with JournalWriter(path, "sorter", 2) as writer:
        assert writer.append("warning", 2, {"message": "on we go"}).seq == 3
    assert [record.seq for record in records_of(path)] == [1, 2, 3]


def test_no_changed_byte_of_a_record_goes_unseen(path: Path) -> None:
    write(path, 1)
    line, chance = path.read_bytes(), random.Random(0)
    for place in range(len(line) - 1):
        changed = bytearray(line)
        changed[place] = chance.choice([byte for byte in b"0123456789abcdefxyz{}," if byte != line[place]])
        assert decode(bytes(changed)) is None, bytes(changed)


def test_readers_stop_at_a_damaged_line(path: Path) -> None:
    write(path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"samples", b"simples") + lines[2])
    assert [record.seq for record in records_of(path)] == [1]


def test_writer_cuts_no_records_behind_damage(path: Path) -> None:
    write(path, 3)
    damaged = path.read_bytes().replace(b'"seq":2', b'"seq":7')
    path.write_bytes(damaged)
    with pytest.raises(IntegrityError, match=r"is damaged at byte \d+, and 1 whole records follow"):
        JournalWriter(path, "sorter", 2)
    assert path.read_bytes() == damaged


def test_second_writer_waits_for_the_firsts_end(path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"1\n"
        with pytest.raises(Conflict, match="another driver writes to"):
            JournalWriter(path, "sorter", 2)
        child.kill()
        child.wait()
    JournalWriter(path, "sorter", 2).close()


def test_what_was_acknowledged_survives_kill_9(path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        told = [child.stdout.readline() for _ in range(50)]
        child.send_signal(signal.SIGKILL)
        child.wait()
        told += [line for line in child.stdout if line.endswith(b"\n")]
    JournalWriter(path, "sorter", 2).close()
    assert [record.seq for record in records_of(path)][: len(told)] == list(range(1, len(told) + 1))


def test_full_disk_leaves_whole_records_only(path: Path) -> None:
    write(path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JournalWriter(path, "sorter", 1) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                step(writer, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes().endswith(b"\n")
        step(writer, 2)
    assert [record.seq for record in records_of(path)] == [1, 2]


def test_unsynced_record_does_not_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with JournalWriter(path, "sorter", 1) as writer:
        step(writer, 1)
        with monkeypatch.context() as broken, pytest.raises(OSError, match="Input/output error"):
            broken.setattr(os, "fsync", fail)
            step(writer, 2)
    assert [record.seq for record in records_of(path)] == [1]


def test_every_append_is_synced_before_it_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    with JournalWriter(path, "sorter", 1) as writer:
        monkeypatch.setattr(os, "fsync", lambda fd: sizes.append(os.fstat(fd).st_size))
        step(writer, 1)
        assert sizes == [path.stat().st_size]


def test_a_journal_is_readable_by_its_owner_only(path: Path) -> None:
    write(path, 1)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_missing_journal_has_no_records(path: Path) -> None:
    assert records_of(path) == []


def test_rewind_drops_later_facts_but_keeps_attempts(path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
        for number in (1, 2, 3):
            step(writer, number)
    with JournalWriter(path, "sorter", 2) as writer:
        begin(writer, resumed_from=1)
        step(writer, 2)
    told = [(record.kind, record.attempt, record.step) for record in lineage(records_of(path))]
    assert told == [("attempt", 1, 0), ("step", 1, 1), ("attempt", 2, 1), ("rewind", 2, 1), ("step", 2, 2)]


def test_rewind_to_minus_one_drops_step_zero() -> None:
    before = Record(1, 1, "sorter", 1, 0, "eval", 0.0, {})
    rewind = Record(1, 2, "sorter", 2, 0, "rewind", 0.0, {"to": -1})
    assert lineage([before, rewind]) == [rewind]


def test_where_an_attempt_was_outlives_a_rewind() -> None:
    placed = Record(1, 1, "sorter", 1, 0, "placed", 0.0, {"nodes": [{"node": "h1"}], "ranks": 2})
    rewind = Record(1, 2, "sorter", 2, 0, "rewind", 0.0, {"to": -1})
    assert lineage([placed, rewind]) == [placed, rewind]


@pytest.mark.parametrize("seed", range(5))
def test_each_step_counts_once_after_resumes(path: Path, seed: int) -> None:
    whole_run(path, random.Random(seed), attempts=5)
    steps = [record.step for record in lineage(records_of(path)) if record.kind == "step"]
    assert steps == list(range(1, max(steps) + 1))


def test_line_holds_its_own_checksum() -> None:
    record = Record(1, 1, "sorter", 1, 0, "warning", 1.5, {"message": "hot"})
    assert decode(encode(record)) == decode(encode(record))
    assert (decode(encode(record)) or record).crc != 0
