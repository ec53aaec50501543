"""The daemon itself: its start and end, its socket, who may use it, what it costs."""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lorad import __version__
from lorad.box.paths import Home
from lorad.client import transport
from lorad.client.client import Client
from lorad.daemon.api import server
from lorad.daemon.api.verbs.logs import read as read_log
from lorad.daemon.daemon import prepare
from lorad.daemon.home_lock import lock
from lorad.errors import Conflict, DaemonUnreachable, LoradError, NotAllowed, StorageError
from lorad.protocol.listener import answers as is_answered
from lorad.protocol.listener import listen
from lorad.records.daemon import Status
from lorad.records.runs import LogPart
from tests.kit.callers import UnixConnection
from tests.kit.daemon_world import serving
from tests.kit.world import REPOSITORY, world


async def test_nonsense_is_answered_in_words(home: Path) -> None:
    async with serving(home) as api:
        for method, path, body, status in (
            ("GET", "/v1/nonsense", None, 404),
            ("POST", "/v1/runs", b"{", 422),
            ("POST", "/v1/runs", b'{"spec": 3}', 422),
            ("GET", "/v1/runs?all=x", None, 422),
            ("POST", "/v1/runs", b" " * (5 << 20), 413),
        ):
            answer = await asyncio.to_thread(raw, api.client, method, path, body)
            assert answer[0] == status
            assert {"kind", "message", "hint"} <= set(json.loads(answer[1])["error"])


def raw(client: Client, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    connection = UnixConnection(client.home.socket, 20)
    with contextlib.suppress(BrokenPipeError):
        connection.request(method, path, body)
    response = connection.getresponse()
    result = response.status, response.read()
    connection.close()
    return result


@pytest.mark.parametrize("kind", ["flock", "lockf"])
def test_home_without_locks_is_refused(home: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    prepare(Home(home))
    monkeypatch.setattr(fcntl, kind, refused)
    with (
        pytest.raises(StorageError, match="its file system locks no files: No locks") as raised,
        lock(Home(home)),
    ):
        pass
    assert "LORAD_HOME" in raised.value.hint and not Home(home).database.exists()


def test_home_whose_locks_hang_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    prepare(Home(home))
    monkeypatch.setattr("lorad.daemon.home_lock.LOCK_SECONDS", 0.05)
    monkeypatch.setattr(fcntl, "flock", lambda *_: answered.wait())
    with pytest.raises(StorageError, match="does not answer when a file is locked"), lock(Home(home)):
        pass
    answered.set()


async def test_other_users_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(home) as api:
        monkeypatch.setattr(server, "peer_uid", lambda request: 54321)
        with pytest.raises(NotAllowed, match="54321"):
            await api("status")


def test_only_a_stale_socket_is_replaced(home: Path) -> None:
    path = home / "x.sock"
    listen(path).close()
    with listen(path), pytest.raises(Conflict):
        listen(path)
    assert [one.name for one in home.iterdir()] == ["x.sock"]


def test_socket_has_its_name_once_it_listens(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, named = home / "x.sock", []
    begin = socket.socket.listen

    def noted(listener: socket.socket, waiting: int) -> None:
        named.append(path.exists())
        begin(listener, waiting)

    monkeypatch.setattr(socket.socket, "listen", noted)
    with listen(path, 0o666):
        assert named == [False] and mode_of(path) == 0o666 and is_answered(path)


def test_reading_a_log_cuts_no_character(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("aé" * 3)
    assert read_log(tmp_path / "log", -3, 100) == LogPart("aé", 9, 9)
    assert read_log(tmp_path / "log", 0, 2) == LogPart("a", 1, 9)
    assert read_log(tmp_path / "log", 1, 2) == LogPart("é", 3, 9)


@pytest.mark.parametrize("mode", [0o755, 0o711])
async def test_mode_of_a_home_is_unchanged(home: Path, mode: int) -> None:
    os.chmod(home, mode)
    async with serving(home) as api:
        assert mode_of(home) == mode
        for name in ("runs", "pools", "logs", "lorad.db", "journal.jsonl", "lorad.sock"):
            assert not mode_of(api.ctx.home.root / name) & 0o077, name


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_home_writable_by_others_is_refused(home: Path) -> None:
    for mode in (0o1777, 0o777, 0o702):
        home.chmod(mode)
        with pytest.raises(NotAllowed):
            prepare(Home(home))
    done = subprocess.run([sys.executable, "-m", "lorad.daemon"], capture_output=True, text=True)
    assert done.returncode == NotAllowed.exit_code
    assert str(home) in done.stderr and f"chmod go-w {home}" in done.stderr
    assert mode_of(home) == mode


async def test_a_storage_that_others_can_replace_is_refused(home: Path, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    with pytest.raises(NotAllowed, match="may be written to by other users"):
        async with serving(home, storage=tmp_path):
            pass
    os.chmod(tmp_path, 0o1777)  # as scratch directories are: nobody can replace what is there
    async with serving(home, storage=tmp_path):
        assert mode_of(tmp_path) == 0o1777


@pytest.mark.system
def test_daemon_without_log_starts_and_says_so(home: Path) -> None:
    (home / "logs" / "daemon.log").mkdir(parents=True)
    process = start(home)
    answers(home)
    deadline = time.monotonic() + 60
    while not (troubles := Client(Home(home)).status().troubles) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "daemon.log: Is a directory" in troubles[0]
    process.terminate()
    assert process.wait(60) == 0


@pytest.mark.parametrize("file", ["lorad.db", "journal.jsonl", "daemon.lock", "config.yaml"])
def test_daemon_with_broken_files_says_what_helps(home: Path, file: str) -> None:
    (home / file).mkdir()
    done = subprocess.run([sys.executable, "-m", "lorad.daemon"], capture_output=True, text=True)
    assert done.returncode and f"{home / file}: " in done.stderr and "Traceback" not in done.stderr
    hints = {
        "lorad.db": "doctor --repair",
        "journal.jsonl": "Move it aside",
        "daemon.lock": "",
        "config.yaml": "YAML",
    }
    assert hints[file] in done.stderr


@pytest.mark.system
def test_daemon_without_descriptors_says_so_once(home: Path) -> None:
    process, log = start(home, "prlimit", "--nofile=64"), home / "logs" / "daemon.log"
    answers(home)
    idle = [socket.socket(socket.AF_UNIX) for _ in range(120)]
    for one in idle:
        one.connect(str(home / "lorad.sock"))
    deadline = time.monotonic() + 60
    while "new connections wait: [Errno 24]" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    for one in idle:
        one.close()
    answers(home)
    process.terminate()
    assert process.wait(60) == 0
    text = log.read_text() + (home / "stderr").read_text()
    assert text.count("Errno 24") == 1 and "Traceback" not in text


def start(home: Path, *limited: str) -> subprocess.Popen[bytes]:
    quiet, command = subprocess.DEVNULL, [*limited, sys.executable, "-m", "lorad.daemon"]
    with (home / "stderr").open("wb") as errors:
        return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=errors)


def answers(home: Path) -> Status:
    deadline = time.monotonic() + 60
    while True:
        try:
            return Client(Home(home)).status()
        except DaemonUnreachable:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.system
def test_of_two_daemons_started_at_once_one_stays(home: Path) -> None:
    both = [start(home), start(home)]
    answers(home)
    assert wait_any(both) == LoradError.exit_code
    pid = Client(Home(home)).shutdown().pid
    assert pid in [process.pid for process in both]
    assert sorted(process.wait(60) for process in both) == [0, LoradError.exit_code]
    assert not (home / "lorad.sock").exists()


@pytest.mark.system
def test_stopped_daemon_names_pools_and_they_end() -> None:
    with world() as made:
        made.home.root.mkdir(parents=True)
        made.home.config.write_text("idle_timeout: 10")
        made.lorad("run", made.spec(), "trainer.steps=1", "--name", "a", "--wait")
        pool = made.client.pools()[0].pid
        stopped = made.lorad("daemon", "stop").stderr
        assert "Pool tiny-1 is idle and ends in" in stopped and "is stopped." in stopped
        assert pool is not None
        wait_gone(pool)
        made.lorad("resume", "a", "--steps", "2", "--wait")
        pool = made.client.pools()[0].pid
        assert "Pool tiny-1 ended" in made.lorad("daemon", "stop", "--pools").stderr
        assert not Path(f"/proc/{pool}").exists()


def test_wrong_tokens_file_is_reported_until_fixed() -> None:
    with world() as made:
        made.home.root.mkdir(parents=True)
        tokens = made.root / "tokens.yaml"
        tokens.write_text("ann: a-token-of-sixteen\n")
        tokens.chmod(0o644)
        # nothing is served: nobody listens
        made.home.config.write_text(f"gateway: {{port: 39471, tokens: {tokens}}}")
        wrong = f"{tokens} is readable by others (mode 0644). chmod 600 {tokens}"
        assert wrong in made.lorad("daemon", "start").stdout
        assert (
            wrong in made.lorad("doctor", expect=1).stdout
            and wrong in made.lorad("logs", "--of", "daemon").stdout
        )
        tokens.chmod(0o600)
        told = made.client.status()
        assert (told.url, told.url_trouble) == ("http://127.0.0.1:39471/v1", "")
        assert "http://127.0.0.1:39471/v1" in made.lorad("daemon", "status").stdout
        made.lorad("daemon", "stop")
        assert wrong in made.lorad("logs", "--of", "daemon").stdout  # though no daemon reads it
        assert "needs the name of a run" in made.lorad("logs", expect=2).stderr


OLDER = """
import lorad
lorad.__version__ = "0.0.9"
from lorad.daemon.__main__ import main
from tests.kit.warm.processes import keep_warm
keep_warm()
main()
"""


@pytest.mark.system
def test_older_daemon_is_replaced_under_a_run() -> None:
    with world() as made:
        env = os.environ | {"LORAD_HOME": str(made.home.root), "PYTHONPATH": str(REPOSITORY)}
        older = subprocess.Popen([sys.executable, "-c", OLDER], env=env, cwd="/", start_new_session=True)
        answers(made.home.root)
        made.lorad("run", made.spec(), "trainer.steps=100000", "--name", "a", "--detach")
        before, driver = made.lorad("list").stderr, made.pid("a", "driver")
        assert before.count("The daemon is version 0.0.9, this command is version") == 1
        made.lorad("daemon", "restart")
        assert older.wait(60) == 0 and made.client.status().version == __version__
        made.reached("a", made.client.show("a").step + 1)
        assert made.pid("a", "driver") == driver and "The daemon is" not in made.lorad("list").stderr


async def test_another_protocol_is_refused_but_seen_and_ended(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(home) as api:
        monkeypatch.setattr(transport, "PROTOCOL", 99)
        with pytest.raises(Conflict, match=r"speaks protocol 1, and this command protocol 99") as refused:
            await api("list")
        assert "lorad daemon restart" in refused.value.hint
        assert (await api("status")).pid == (await api("shutdown")).pid == os.getpid()


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_any(processes: list[subprocess.Popen[bytes]]) -> int:
    deadline = time.monotonic() + 60
    while all(process.poll() is None for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return next(process.returncode for process in processes if process.returncode is not None)


@pytest.mark.system
def test_a_daemon_starts_again_after_kill_9(home: Path) -> None:
    first = start(home)
    before = answers(home).pid
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = start(home)
    assert answers(home).pid == second.pid != before
    second.terminate()
    assert second.wait(60) == 0


@pytest.mark.system
def test_idle_daemon_uses_under_one_percent(home: Path) -> None:
    process = start(home)
    answers(home)
    used = [share_of_a_core(process.pid)]
    while used[-1] >= 0.01 and len(used) < 10:  # what it begins with may take its time
        used.append(share_of_a_core(process.pid))
    process.terminate()
    process.wait(60)
    assert used[-1] < 0.01, used


def share_of_a_core(pid: int, seconds: float = 3.0) -> float:
    before, began = cpu_ticks(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_ticks(pid) - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
