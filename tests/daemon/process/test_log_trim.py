"""Logs of what is alive stay small, and lose nothing on the way."""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lorad.box.config import Supervision
from lorad.box.paths import AttemptDir
from lorad.daemon import trim_logs
from lorad.daemon.api.verbs.logs import read
from lorad.daemon.process import log_trim
from tests.kit.daemon_world import behave, open_context, reconciling, submit, until, until_state

LIMIT = 1 << 16
WRITER = """
import os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for number in range(int(sys.argv[2])):
    os.write(log, b"%d\\n" % number)
"""


@pytest.fixture(params=["collapse", "copy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to cut; the first only where the filesystem can."""
    if request.param == "copy":
        monkeypatch.setattr(log_trim, "collapse", lambda fd, gone: False)
    return str(request.param)


def numbered(path: Path, lines: int, first: int = 0) -> None:
    with path.open("a") as log:
        log.writelines(f"line {number:06d}\n" for number in range(first, first + lines))


def test_trimmed_log_keeps_newer_half_and_mark(tmp_path: Path, way: str) -> None:
    path = tmp_path / "log"
    numbered(path, 10_000)
    assert log_trim.cut(path, LIMIT)
    assert path.stat().st_size <= LIMIT
    first, *_, last = path.read_text().splitlines()
    assert first.startswith("[lorad] ") and "bytes of this log were cut before here" in first
    assert last == "line 009999"


def test_a_log_within_its_limit_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    numbered(path, 100)
    before = path.read_bytes()
    assert not log_trim.cut(path, LIMIT) and path.read_bytes() == before


def test_follower_continues_at_its_offset_after_cut(tmp_path: Path, way: str) -> None:
    path = tmp_path / "log"
    numbered(path, 10_000)
    offset = read(path, -11, 1 << 20).offset
    for first in (10_000, 20_000):
        assert log_trim.cut(path, LIMIT)
        numbered(path, 10_000, first)
        part = read(path, offset, 12)
        assert part.text == f"line {first:06d}\n"
        offset = read(path, -1, 1).offset


def test_slow_follower_continues_from_what_remains(tmp_path: Path, way: str) -> None:
    path = tmp_path / "log"
    numbered(path, 10_000)
    log_trim.cut(path, LIMIT)
    part = read(path, 600, 40)
    assert part.text.startswith("[lorad]") and part.offset > 600 + 40


def test_offset_past_the_end_reads_from_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    numbered(path, 2)
    assert read(path, 1000, 12).text == "line 000000\n"
    assert read(path, 24, 12).text == ""


@pytest.fixture
def collapsible() -> Iterator[Path]:
    """A directory on disk, of whose files a range can be taken out; in memory that cannot be done."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        (path := Path(directory) / "probe").write_bytes(bytes(1 << 20))
        with path.open("r+b") as file:
            if not log_trim.collapse(file.fileno(), 1 << 19):
                pytest.skip("no range can be taken out of a file in /var/tmp")
        yield Path(directory)


def test_lines_written_during_a_cut_survive(collapsible: Path) -> None:
    path, lines = collapsible / "log", 60_000
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(lines)])
    cuts = 0
    while writer.poll() is None:
        cuts += log_trim.cut(path, LIMIT)
    if not cuts:
        pytest.skip("the writer was done before it was cut")
    _, _, *kept = path.read_text().splitlines()  # without the mark, and the line that it was written over
    assert [int(line) for line in kept] == list(range(lines - len(kept), lines))


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_file_with_another_name_is_nobodys_log(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    precious, attempt = tmp_path / "elsewhere" / "precious", tmp_path / "attempt"
    for directory in (precious.parent, attempt):
        directory.mkdir()
    numbered(precious, 10_000)
    link(precious, attempt / "trainer.log")
    before = precious.read_bytes()
    log_trim.cut_all([AttemptDir(attempt)], LIMIT)
    assert precious.read_bytes() == before


async def test_the_next_look_waits_for_the_one_before(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cutting, gate = [], threading.Event()
    monkeypatch.setattr(trim_logs, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(trim_logs, "cut_all", lambda *_: cutting.append(gate.wait(30)))
    ctx = open_context(home)
    for _ in range(3):
        trim_logs.rotate(ctx)
    assert len(ctx.loop.tasks) == 1
    gate.set()
    await asyncio.gather(*ctx.loop.tasks)
    trim_logs.rotate(ctx)
    assert len(cutting) == 1 and len(ctx.loop.tasks) == 1
    await asyncio.gather(*ctx.loop.tasks)


async def test_daemon_trims_logs_of_running_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trim_logs, "LOOK_SECONDS", 0.1)
    behave(home, driver={"seconds": 0.1, "prints": 10_000})
    async with reconciling(home, supervision=Supervision(log_bytes=LIMIT)) as ctx:
        submit(ctx, "a", trainer={"steps": 1000})
        await until_state(ctx, "a", "running")
        log = ctx.home.run("a").attempt(1).log
        await until(lambda: log.read_bytes().startswith(b"[lorad] "))
        assert log.stat().st_size <= 2 * LIMIT
