"""The door as the daemon keeps it: started by config.yaml, tried by `lorad tinker env`, back when killed."""

import json
import os
import signal
from typing import Any

from lorad.daemon.process.processes import attempts_under, read_status
from tests.kit.world import World
from tests.tinker.crash import RUN, Asker, box
from tests.tinker.door_kit import BASE


def env(made: World, key: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made.lorad("tinker", "env", "--json", TINKER_API_KEY=key).stdout)
    return found


def test_env_makes_a_key_and_finds_the_door() -> None:
    with box(overrides=["checkpoint.every=7"]) as (made, port, _):
        first = env(made, "tml-of-somebody-else")
        assert first["TINKER_BASE_URL"] == f"http://127.0.0.1:{port}" and first["bases"] == [BASE]
        key = first["TINKER_API_KEY"]
        assert key != "tml-of-somebody-else" and env(made, key)["TINKER_API_KEY"] == key
        asker = Asker(port, key)
        assert made.client.show(RUN.format(asker.session)).spec["checkpoint"]["every"] == 7
        (life,) = attempts_under(made.home.tinker)
        status = read_status(life)
        assert status is not None
        os.kill(status["pid"], signal.SIGKILL)
        assert env(made, key)["TINKER_API_KEY"] == key
        shown = made.lorad("tinker", "env", TINKER_API_KEY=key)
        assert f"export TINKER_API_KEY={key}" in shown.stdout and "notebook" in shown.stderr
