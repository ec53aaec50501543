"""The process `python -m lorad.pool`: its configuration, its socket, its end."""

import os
import signal
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorad.adapters.peft import read_peft
from lorad.box.paths import Home
from lorad.pool import config as configuration
from lorad.pool.__main__ import _prepare
from lorad.pool.host import is_needed
from lorad.protocol.calls import Nothing
from lorad.protocol.connection import Connection
from lorad.protocol.listener import listen
from lorad.protocol.pool_setup import ServerSetup
from lorad.protocol.status import PoolInfo
from tests.kit.pool_kit import DEADLINE, OPEN, config_of, publish, running_pool, until
from tests.kit.warm.processes import CLIENT

ROOT = Path(__file__).resolve().parents[2]
SERVER = ServerSetup(max_rank=16, targets=(), context_length=64)
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    """Starts `python -m lorad.pool` on a directory of this test's own."""
    started: list[subprocess.Popen[str]] = []

    def begin(**changes: object) -> subprocess.Popen[str]:
        configuration.write(config_of(home, **changes), home)
        command = [*CLIENT, "-m", "lorad.pool", str(home)]
        started.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def connected(home: Path, process: subprocess.Popen[str], run: str = "") -> Connection:
    path = home / "pool.sock"
    until(lambda: path.exists() or process.poll() is not None)
    until(lambda: can_connect(path) or process.poll() is not None)
    return Connection(path, run=run, attempt=1, timeout=DEADLINE)


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def test_sigterm_writes_pending_versions_and_removes_socket(start: Start, home: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(home / "pool.sock"))
    process = start(threads=1)
    with connected(home, process, "sorter") as connection:
        second = start(threads=1)
        assert second.wait(DEADLINE) == 1
        assert "another process answers" in second.communicate()[1]
        info: PoolInfo = connection.call("hello", Nothing())
        assert (info.threads, info.model) == (1, "builtin:tiny")
        assert stat.S_IMODE((home / "pool.sock").stat().st_mode) == 0o600
        connection.call("open", OPEN)
        published = publish(connection, tmp_path, 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
    assert not (home / "pool.sock").exists()
    assert read_peft(tmp_path / "sorter" / "versions" / "000000").digest() == published.sha256


def test_idle_pool_without_a_daemon_ends(start: Start) -> None:
    process = start(idle_timeout=0.5)
    assert process.wait(DEADLINE) == 0
    assert "no daemon, and idle for" in process.communicate()[1]


def test_daemon_driver_or_gateway_keeps_a_pool(home: Path, tmp_path: Path) -> None:
    at_home = Home(home)
    with running_pool(home, idle_timeout=0.0) as running:

        def needed() -> bool:
            return is_needed(running.pool, running.config, at_home)

        until(lambda: not needed())
        with listen(at_home.socket):
            assert needed()
        with running.connect("sorter") as driver:
            driver.call("hello", Nothing())
            assert needed()
        until(lambda: not needed())
        running.pool.loaded.kept = lambda: ["sorter@1"]  # type: ignore[method-assign]
        assert not needed()
        with listen(at_home.gateway_socket):
            assert needed()


def test_missing_model_ends_the_pool_with_a_message(start: Start, tmp_path: Path) -> None:
    process = start(model_path=str(tmp_path / "gone"))
    assert process.wait(DEADLINE) == 1
    assert str(tmp_path / "gone") in process.communicate()[1]


def test_pool_without_configuration_ends_with_a_message(tmp_path: Path) -> None:
    command = [*CLIENT, "-m", "lorad.pool", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pool.json" in done.stderr


@pytest.mark.parametrize(
    ("changes", "own", "expandable"),
    [
        ({"device": "cuda:0"}, {}, True),
        ({"device": "cpu"}, {}, False),
        (
            {
                "device": "cuda:0",
                "engine": "vllm",
                "server": ServerSetup(max_rank=16, targets=(), context_length=64),
            },
            {},
            False,
        ),
        ({"device": "cuda:0"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, False),
    ],
)
def test_memory_of_a_gpu_has_no_holes(
    changes: dict[str, Any],
    own: dict[str, str],
    *,
    expandable: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {**own})
    _prepare(config_of(tmp_path, **changes))
    assert ("expandable_segments:True" in os.environ.values()) is expandable
