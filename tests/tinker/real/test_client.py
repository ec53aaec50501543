"""`make tinker`: the unmodified official client, and older ones, against a daemon, its door and a builtin
pool.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lorad.daemon.process.processes import attempts_under, read_status
from tests.kit.pool_kit import TINY
from tests.kit.world import World, world

BASE, KEY = "tiny/base", "tml-0123456789abcdef"
HERE = Path(__file__).parent
_SECONDS = 1200  # for a script, of which a server's start is the most on a busy machine
PYTHON = os.environ.get("LORAD_TINKER_PYTHON", "")
OLDER = [path for path in os.environ.get("LORAD_TINKER_CLIENTS", "").split(":") if path]

pytestmark = pytest.mark.skipif(not PYTHON, reason="`make tinker` installs the client")


@pytest.fixture(scope="module")
def door() -> Iterator[World]:
    """A home whose daemon keeps a door."""
    with a_door() as made:
        yield made


@contextlib.contextmanager
def a_door(more: str = "", backends: str = "{}", bases: Mapping[str, Path] = {BASE: TINY}) -> Iterator[World]:
    """more: further settings of the door. backends: of config.yaml."""
    with world() as made:
        made.home.tinker.mkdir(parents=True)
        keys = made.home.tinker / "keys.yaml"
        keys.write_text(f"alice: {KEY}\n")
        keys.chmod(0o600)
        port = free_port()
        named = json.dumps({name: str(base) for name, base in bases.items()})
        door = f"tinker: {{port: {port}, bases: {named}{more}}}"
        made.home.config.write_text(f"{door}\nbackends: {backends}\n")
        os.environ["TINKER_BASE_URL"] = f"http://127.0.0.1:{port}"
        made.lorad("daemon", "start")
        made.until(lambda: answers(port), "the door answers")
        yield made


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def environment(**more: str) -> dict[str, str]:
    """Return what a program of the client's needs, which asks no hub but the door."""
    return {
        **os.environ,
        "TINKER_API_KEY": KEY,
        "TINKER_TELEMETRY": "0",
        "HF_ENDPOINT": os.environ["TINKER_BASE_URL"],
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **more,
    }


def started(script: str, path: str = "") -> subprocess.Popen[str]:
    """Start a script of the client's."""
    argv, pipe = [PYTHON, str(HERE / script), BASE], subprocess.PIPE
    return subprocess.Popen(
        argv, env=environment(PYTHONPATH=path), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def said(script: str, path: str = "") -> str:
    """Run a script of the client's; what it printed."""
    return ended(started(script, path))


def ended(process: subprocess.Popen[str], given: str = "") -> str:
    """Wait for the end of a script that is given that; what it printed."""
    output, errors = process.communicate(given, timeout=_SECONDS)
    assert process.returncode == 0, f"{output[-6000:]}\n{errors[-6000:]}"
    return output


def test_the_newest_client_finds_nothing_wrong(door: World) -> None:
    output = said("client_check.py")
    assert output.splitlines()[-1].startswith("all "), output
    print(output)


def test_every_method_of_the_client_is_known(door: World) -> None:
    assert "all methods are known" in said("client_coverage.py")


@pytest.mark.parametrize("path", OLDER, ids=lambda path: Path(path).name)
def test_older_clients_train_and_sample(door: World, path: str) -> None:
    assert f"with {Path(path).name.replace('-', ' ')}" in said("client_old.py", path)


def test_the_messages_are_those_of_the_client(door: World) -> None:
    """Field by field, in both directions."""
    assert "all messages are known" in said("client_messages.py", str(HERE.parents[2]))


def test_a_killed_door_changes_no_number(door: World) -> None:
    calm = said("client_restart.py").splitlines()[-1]
    first = len([*attempts_under(door.home.tinker)])
    process = started("client_restart.py")
    assert process.stdin is not None and process.stdout is not None
    for life, word in enumerate(("sampling", "training"), first):
        assert process.stdout.readline() == f"{word}\n"
        time.sleep(0.3)  # somewhere in its work, which waits for that
        os.kill(living(door, life), signal.SIGKILL)
        process.stdin.write("\n")
        process.stdin.flush()
    assert ended(process).splitlines()[-1] == calm


def living(made: World, life: int) -> int:
    """Wait for the n-th life of the door, until it answers; returns its pid."""
    port = int(os.environ["TINKER_BASE_URL"].rpartition(":")[2])

    def look() -> int | None:
        lives = [*attempts_under(made.home.tinker)]
        status = read_status(lives[-1]) if len(lives) >= life else None
        return status["pid"] if status is not None and answers(port) else None

    pid: int = made.until(look, f"life {life} of the door")
    return pid


def test_a_silent_model_is_paused_and_goes_on() -> None:
    """Heartbeats come every 10 s, so that each session is silent for longer than this door bears."""
    before = os.environ.get("TINKER_BASE_URL", "")
    with a_door(", park_after: 1") as made:
        calm, process = started("client_idle.py"), started("client_idle.py")
        expected = ended(calm, "\n").splitlines()
        assert process.stdout is not None and process.stdout.readline() == f"{expected[0]}\n"
        made.until(lambda: {run.state for run in made.client.list(all=True)} == {"paused"}, "both are paused")
        assert ended(process, "\n").splitlines() == expected[1:]
    os.environ["TINKER_BASE_URL"] = before


def test_the_loop_of_the_page_runs(door: World, tmp_path: Path) -> None:
    page = (HERE.parents[2] / "docs" / "tinker.md").read_text()
    loop = page.partition("```python\n")[2].partition("```")[0].replace("Qwen/Qwen3-8B", BASE)
    script = tmp_path / "loop.py"
    script.write_text(f"{loop}\nimport os, sys; sys.stdout.flush(); os._exit(0)\n")
    assert len(said(str(script)).splitlines()) == 6
