"""Processes report that they live and make progress: what a heartbeat holds, and what the driver and the pool
write.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.errors import PoolLost
from lorad.models.compute import Compute
from lorad.pool import config as configuration
from lorad.pool import host
from lorad.protocol import heartbeat
from lorad.protocol.calls import Nothing
from lorad.protocol.connection import Connection
from lorad.protocol.driver_params import DriverParams, write_params
from lorad.protocol.heartbeat import BYTES, Count, Heart, read_beat
from lorad.spec.model import Spec
from tests.kit.pool_kit import DEADLINE, config_of, until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that end with the test."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@contextlib.contextmanager
def in_thread(work: Callable[[], Any]) -> Iterator[None]:
    """A thread that did `work` and stays there meanwhile."""
    done, ending = threading.Event(), threading.Event()

    def live() -> None:
        work()
        done.set()
        ending.wait()

    thread = threading.Thread(target=live)
    thread.start()
    done.wait()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def test_progress_grows_while_what_is_done_gets_on() -> None:
    heart = Heart()
    heart.work("sample")
    first, second = heart.beat(), heart.beat()
    assert (first.doing, second.progress) == ("sample", first.progress)
    heart.progress()
    assert heart.beat().progress > second.progress
    heart.work("")
    assert heart.beat().doing == ""


def test_busy_thread_hides_no_hanging_one() -> None:
    heart = Heart()
    with in_thread(lambda: heart.work("computing")):
        before = heart.beat()
        for _ in range(3):
            heart.work("serving")
            now = heart.beat()
            assert (now.progress, now.doing) == (before.progress, "computing")
    assert heart.beat().doing == "serving"  # who ended does nothing


def test_who_waits_for_another_has_nothing_to_do() -> None:
    heart = Heart()
    heart.work("train")
    with heart.waits():
        assert heart.beat().doing == ""
        with heart.waits():
            pass
        assert heart.beat().doing == ""
    assert heart.beat().doing == "train"


async def test_blocked_event_loop_shows_in_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "LOOP_SECONDS", 0.1)
    monkeypatch.setattr(host, "LOOP_SECONDS", 0.01)
    monkeypatch.setattr(host, "HEART", heart := Heart())
    pulse = asyncio.create_task(host.follow_loop())
    await asyncio.sleep(0.05)
    assert (before := heart.beat()).doing == ""
    time.sleep(0.2)  # noqa: ASYNC251 (that is the point)
    assert (heart.beat().doing, heart.beat().progress) == ("one turn of its event loop", before.progress)
    await asyncio.sleep(0.05)
    assert heart.beat().doing == ""
    pulse.cancel()


async def test_hanging_quantum_shows_in_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.models.compute.HEART", heart := Heart())
    compute, gate = Compute(), threading.Event()
    assert await compute.run(lambda: heart.beat().doing) == "computing"
    assert heart.beat().doing == ""
    asked = asyncio.create_task(compute.run(gate.wait))
    while heart.beat().doing != "computing":  # noqa: ASYNC110 (of a thread)
        await asyncio.sleep(0.01)
    assert heart.beat().progress == heart.beat().progress
    gate.set()
    assert await asked
    compute.close()


def test_heart_overwrites_its_file_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    heart = Heart()
    heart.start(tmp_path / "heartbeat")
    heart.work("train " + 50 * "long")
    until(lambda: (beat := read_beat(tmp_path / "heartbeat")) is not None and beat.doing.startswith("train"))
    first, stat = read_beat(tmp_path / "heartbeat"), (tmp_path / "heartbeat").stat()
    assert (stat.st_size, stat.st_mode & 0o777) == (BYTES, 0o600)
    until(lambda: read_beat(tmp_path / "heartbeat") not in (first, None))
    heart.stop()
    until(lambda: "heartbeat" not in {thread.name for thread in threading.enumerate()})


def test_unwritable_or_torn_heartbeat_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "absent" / "heartbeat", tmp_path / "link"):
        Heart().start(path)
    until(lambda: "heartbeat" not in {thread.name for thread in threading.enumerate()})
    assert not (tmp_path / "elsewhere").exists() and read_beat(tmp_path / "absent") is None
    (tmp_path / "torn").write_text('{"at": 1')
    assert read_beat(tmp_path / "torn") is None


def test_waiting_for_the_pool_counts_as_idle(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.protocol.connection.HEART", heart := Heart())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home / "pool.sock"))
        listener.listen()
        heart.work("train")
        connection = Connection(home / "pool.sock", timeout=DEADLINE)
        peer, _ = listener.accept()
        told: list[str] = []

        def hang_up() -> None:
            peer.recv(1)
            with contextlib.suppress(AssertionError):
                until(lambda: heart.beat().doing == "")
            told.append(heart.beat().doing)
            peer.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(PoolLost):
            connection.call("hello", Nothing())
        thread.join()
        connection.close()
    assert told == [""] and heart.beat().doing == "train"


def test_driver_waiting_for_its_pool_beats_idle(home: Path, started: list[subprocess.Popen[bytes]]) -> None:
    run = home / "run"
    run.mkdir()
    (run / "spec.json").write_bytes(msgspec.json.encode(Spec(), enc_hook=str))
    socket_path = str(home / "pool.sock")
    params = DriverParams(
        run="r", run_dir=str(run), attempt=1, steps=1, pool="p", pool_socket=socket_path, cwd=str(home)
    )
    write_params(home, params)
    started.append(subprocess.Popen([sys.executable, "-m", "lorad.driver", str(home)], cwd=ROOT))
    until((home / "heartbeat").exists)
    first = read_beat(home / "heartbeat")
    until(lambda: (beat := read_beat(home / "heartbeat")) not in (None, first) and beat.doing == "")
    os.kill(started[0].pid, signal.SIGTERM)
    assert started[0].wait(DEADLINE) == 0


ORDER = """
import os, runpy, sys
from lorad.protocol.heartbeat import HEART

def start(path):
    os.write(told, b"beats ")
    begin(path)

def note(event, args):
    if event == "import" and args[0] == "torch":
        os.write(told, b"torch ")

told = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT)
begin, HEART.start = HEART.start, start
sys.addaudithook(note)
runpy.run_module("lorad.pool", run_name="__main__", alter_sys=True)
"""


@pytest.mark.system
def test_pool_beats_before_it_imports_torch(home: Path, started: list[subprocess.Popen[bytes]]) -> None:
    attempt = home / "attempts" / "0001"
    attempt.mkdir(parents=True)
    configuration.write(config_of(home), home)
    started.append(subprocess.Popen([sys.executable, "-c", ORDER, str(home / "order"), str(home)], cwd=ROOT))
    until((home / "pool.sock").exists)
    assert (home / "order").read_text().split()[:2] == ["beats", "torch"]
    ready = time.time()
    until(lambda: (beat := read_beat(attempt / "heartbeat")) is not None and beat.at > ready)
    assert (beat := read_beat(attempt / "heartbeat")) is not None and beat.doing == ""


def test_a_beat_has_words_for_people(tmp_path: Path) -> None:
    heart = Heart()
    heart.tell("sampling 41 of 64")
    (tmp_path / "heartbeat").write_bytes(heart._line())
    beat = read_beat(tmp_path / "heartbeat")
    assert beat is not None and beat.words == "sampling 41 of 64"


def test_another_phase_is_told_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.protocol.heartbeat.BEAT_SECONDS", 1000.0)
    heart = Heart()
    heart.start(tmp_path / "heartbeat")

    def is_read(words: str) -> bool:
        found = read_beat(tmp_path / "heartbeat")
        return found is not None and found.words == words

    try:
        for words in ("sampling 0 of 64", "training", ""):
            heart.tell(words)
            until(partial(is_read, words))
    finally:
        heart.stop()


def test_a_count_says_how_many_and_how_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lorad.protocol.heartbeat.time.monotonic", lambda: now[0])
    words = list[str]()
    count = Count("sampling", 64, words.append)
    count.add(tokens=500)
    now[0] += 4.0
    count.add(ended=41, tokens=2748)
    assert words == ["sampling 0 of 64", "sampling 0 of 64", "sampling 41 of 64, 812 tok/s"]


@pytest.mark.parametrize("words", ["日本" * 40, '"\\' * 40, "x" * 400])
def test_no_words_make_a_beat_unreadable(words: str, tmp_path: Path) -> None:
    heart = Heart()
    heart.work("y" * 150)
    heart.tell(words)
    (tmp_path / "heartbeat").write_bytes(heart._line())
    beat = read_beat(tmp_path / "heartbeat")
    assert beat is not None and beat.doing == "y" * 100


@pytest.mark.parametrize(
    ("words", "read"), [("a\nb\tc", "a b c"), ("x" * 200, "x" * 60), (None, "None"), ({"a": 1}, "{'a': 1}")]
)
def test_words_of_somebody_else_are_one_short_line(words: object, read: str, tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    path.write_text(json.dumps({"at": 1.0, "progress": 1, "doing": "", "words": words})[:256])
    found = read_beat(path)
    assert found is not None and found.words == read
