"""Doors of a home that several users share: a front that is root's, and a door of each user's."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import unused_port

from lorad.box.keys import make_key
from lorad.box.paths import Home
from lorad.client.transport import Transport
from lorad.records.requests import ShutdownRequest
from tests.daemon.test_system_mode import ALICE, BOB, Box, as_user, status_of
from tests.gateway.test_refusals import answers as listens
from tests.gateway.test_shared import open_files, pid_of, until
from tests.kit.passable import why_not
from tests.kit.pool_kit import TINY
from tests.kit.warm.processes import CLIENT as WARM
from tests.kit.world import COLD
from tests.tinker.door_kit import BASE, Caller, a_pass

pytestmark = pytest.mark.system

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}


@pytest.fixture(scope="module", autouse=True)
def users() -> None:
    if reason := why_not():
        pytest.skip(reason)


class Doors(Box):
    """Keys of Alice and Bob, and one of nobody; a base that both may read."""

    def __init__(self, root: Path) -> None:
        self.port, self.world = unused_port(), Home(root / "lorad")
        (root / "lorad").mkdir()
        shutil.copytree(TINY, root / "model")
        for path in (root / "model", *(root / "model").iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        self.world.config.write_text(
            f"devices: {{cpu_slots: 2}}\ntinker: {{port: {self.port}, bases: {{{BASE}: {root / 'model'}}}}}\n"
        )
        file = self.world.tinker / "keys.yaml"
        self.keys = {uid: make_key(file, str(uid)) for uid in (ALICE, BOB)}
        self.trained = dict[int, tuple[str, str]]()
        super().__init__(root)
        until(self.is_open)

    def is_open(self) -> bool:
        return listens(self.port) and None not in (self.sees(ALICE), self.sees(BOB))

    def door_of(self, uid: int) -> int:
        return pid_of(self.world.tinker_of(uid))

    @property
    def doors(self) -> tuple[int, ...]:
        return self.front, self.door_of(ALICE), self.door_of(BOB)

    @property
    def front(self) -> int:
        return pid_of(self.world.tinker)

    @contextlib.asynccontextmanager
    async def caller(self, uid: int) -> AsyncIterator[Caller]:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self.port}") as session:
            yield Caller(session, self.keys[uid])  # type: ignore[arg-type]

    def sees(self, uid: int) -> list[str] | None:
        """Ask for the models that a user has; None where the front says to ask again: a door that
        has not started, or a daemon that has not answered, within its patience.
        """

        async def ask() -> list[str] | None:
            async with self.caller(uid) as caller:
                status, listed = await caller.asked("training_runs", method="GET")
                if status == 503:
                    return None
                assert status == 200, (status, listed)
                return [one["training_run_id"] for one in listed["training_runs"]]

        return asyncio.run(ask())

    async def step(self, uid: int) -> tuple[str, str]:
        """Train a model for a step; returns it, and a sampler of its weights, which has answered."""
        async with self.caller(uid) as caller:
            model = await caller.model(await caller.session())
            for request in [
                await caller.forward_backward(model, 1, a_pass(model, 1)),
                await caller.send("optim_step", model, 2, adam_params={"learning_rate": 1e-3}),
                await caller.send("save_weights_for_sampler", model, 3, sampling_session_seq_id=0),
                await caller.send("save_weights", model, 4, path="kept"),
            ]:
                made = await caller.result(request)
                assert b"error" not in made if isinstance(made, bytes) else "error" not in made, made
                sampler = made.get("sampling_session_id", "") if isinstance(made, dict) else ""
                if sampler:
                    found = sampler
            asked = {"sampling_session_id": found, "seq_id": 1, "prompt": PROMPT}
            sampled = await caller.ask("asample", asked | {"sampling_params": {"max_tokens": 3}})
            assert isinstance(await caller.result(sampled["request_id"]), bytes)
            return model, found


@pytest.fixture(scope="module")
def box() -> Iterator[Doors]:
    root = Path(tempfile.mkdtemp(prefix="lr-"))
    root.chmod(0o711)
    made = Doors(root)
    try:
        made.trained = {uid: asyncio.run(made.step(uid)) for uid in (ALICE, BOB)}
        made.replace(COLD, *made.doors)  # a fork has open what the warm process has
        until(made.is_open)
        yield made
    finally:
        made.close()
        shutil.rmtree(root, ignore_errors=True)


def test_a_users_door_runs_unprivileged_as_that_user(box: Doors) -> None:
    for uid in (ALICE, BOB):
        status = status_of(box.door_of(uid))
        assert status["Uid"].split() == [str(uid)] * 4
        assert (status["NoNewPrivs"], int(status["CapEff"], 16), int(status["CapPrm"], 16)) == ("1", 0, 0)
    assert status_of(box.front)["Uid"].split() == ["0"] * 4


def test_models_are_runs_and_files_of_their_user(box: Doors) -> None:
    for uid in (ALICE, BOB):
        [run] = [run for run in box.ask(ALICE, "GET", "runs")["items"] if run["owner"] == str(uid)]
        files = [*(box.home / "runs" / run["name"] / "tinker").rglob("*"), box.world.tinker_of(uid) / "work"]
        assert {path.stat().st_uid for path in files} == {uid}
        assert {path.stat().st_mode & 0o077 for path in files} == {0}
        assert len(files) > 4


def test_the_front_opens_nothing_of_users(box: Doors) -> None:
    names = open_files(box.front)
    assert not [name for name in names if "/runs/" in name or "/owners/" in name or "tokenizers" in name]
    for path in (box.world.tinker / "keys.yaml", box.world.tinker_socket_of(ALICE)):
        assert "denied" in as_user(BOB, "cat", str(path)).stderr


async def test_others_objects_are_not_there(box: Doors) -> None:
    model, sampler = box.trained[ALICE]
    path = f"tinker://{model}/weights/kept"
    async with box.caller(BOB) as bob, box.caller(ALICE) as alice:
        for caller, status in ((alice, 200), (bob, 404)):
            await caller.ask("get_info", {"model_id": model}, status=status)
            await caller.ask("weights_info", {"tinker_path": path}, status=status)
            asked = {"sampling_session_id": sampler, "seq_id": 2, "prompt": PROMPT, "sampling_params": {}}
            await caller.ask("asample", asked, status=status)
        await alice.ask(f"training_runs/{model}/checkpoints/weights/kept/publish", status=204)
        await bob.ask("weights_info", {"tinker_path": path}, status=404)  # her files are hers alone


def test_lists_have_ones_own_alone(box: Doors) -> None:
    assert [box.sees(uid) for uid in (ALICE, BOB)] == [[box.trained[uid][0]] for uid in (ALICE, BOB)]


def test_the_front_follows_no_link_to_a_socket(box: Doors) -> None:
    socket = box.world.tinker_socket_of(ALICE)
    aside = socket.with_name("aside")
    assert not as_user(ALICE, "mv", str(socket), str(aside)).stderr
    as_user(ALICE, "ln", "-s", str(box.world.socket), str(socket))  # who answers there obeys the front

    async def ask(uid: int, status: int) -> Any:
        async with box.caller(uid) as caller:
            return await caller.ask("training_runs", method="GET", status=status)

    try:
        assert "Tinker door of user" in asyncio.run(ask(ALICE, 503))["detail"]
        asyncio.run(ask(BOB, 200))
    finally:
        socket.unlink()
        aside.rename(socket)
    assert box.sees(ALICE)


def test_a_killed_door_comes_back_alone(box: Doors) -> None:
    pid, other = box.door_of(ALICE), box.door_of(BOB)
    os.kill(pid, signal.SIGKILL)
    until(lambda: box.door_of(ALICE) not in (0, pid))
    until(lambda: listens(box.port) and box.sees(ALICE) == [box.trained[ALICE][0]])
    assert box.door_of(BOB) == other


def test_a_new_daemon_keeps_running_doors(box: Doors) -> None:
    pids = box.doors
    box.daemon.kill()
    box.daemon.wait()
    assert box.sees(ALICE) and box.sees(BOB)
    box.replace(WARM)
    asyncio.run(box.step(BOB))
    assert pids == box.doors


def test_doors_end_with_the_daemon_on_request(box: Doors) -> None:
    pids, models = box.doors, box.sees(BOB)
    assert models
    Transport(box.world.socket, 60).ask("POST", "/v1/shutdown", ShutdownRequest(gateway=True))
    box.daemon.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    box.python = WARM
    box.daemon = box.start()
    until(lambda: listens(box.port) and box.sees(BOB) == models)
