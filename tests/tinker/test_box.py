"""The door as the daemon keeps it: started by config.yaml, tried by `lorad tinker env`, back when killed."""

import json
import os
import signal
from subprocess import CompletedProcess
from typing import Any

import pytest

from lorad.daemon.process.processes import attempts_under, read_status
from tests.kit.world import World
from tests.tinker.crash import RUN, Asker, box
from tests.tinker.door_kit import BASE


def lorad_env(made: World, *options: str, key: str = "") -> CompletedProcess[str]:
    """What the command says to a user who keeps keys and the hub's files in the world's directory."""
    root = str(made.root)
    return made.lorad("tinker", "env", *options, TINKER_API_KEY=key, XDG_CONFIG_HOME=root, HF_HOME=root)


def env(made: World, *options: str, key: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lorad_env(made, "--json", *options, key=key).stdout)
    return found


@pytest.mark.system
def test_env_makes_a_key_and_finds_the_door() -> None:
    with box(overrides=["checkpoint.every=7"]) as (made, port, _):
        first = env(made, key="tml-of-somebody-else")
        url = f"http://127.0.0.1:{port}"
        assert first["TINKER_BASE_URL"] == first["HF_ENDPOINT"] == url and first["bases"] == [BASE]
        key = first["TINKER_API_KEY"]
        assert key != "tml-of-somebody-else" and env(made)["TINKER_API_KEY"] == key
        asker = Asker(port, key)
        assert made.client.show(RUN.format(asker.session)).spec["checkpoint"]["every"] == 7
        os.kill(door(made), signal.SIGKILL)
        other = env(made, "--new")["TINKER_API_KEY"]
        assert other != key and env(made)["TINKER_API_KEY"] == other
        shown = lorad_env(made, key=key)
        assert f"export TINKER_API_KEY={key}\nexport TINKER_TELEMETRY=0\n" in shown.stdout
        assert f"export HF_ENDPOINT={url}\n" in shown.stdout and "notebook" in shown.stderr


def door(made: World) -> int:
    """The pid of its newest life."""
    status = read_status([*attempts_under(made.home.tinker)][-1])
    assert status is not None
    return int(status["pid"])


@pytest.mark.system
def test_the_door_outlives_the_daemon_unless_asked() -> None:
    with box() as (made, port, key):
        Asker(port, key)
        before = door(made)
        made.lorad("daemon", "stop")
        os.kill(before, 0)
        made.lorad("daemon", "start")
        assert env(made, key=key)["TINKER_API_KEY"] == key and door(made) == before
        made.lorad("daemon", "stop", "--gateway")
        made.until(lambda: not is_alive(before), "the door ended")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
