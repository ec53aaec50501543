"""A door in the test's loop, with a daemon that makes no processes and lanes that only do what the HTTP layer
needs: every request of a log gets a result that says which it was.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from aiohttp.test_utils import TestClient, TestServer

from lorad.box.config import TinkerSettings
from lorad.box.keys import keys_file
from lorad.box.paths import Home, RunDir
from lorad.client.client import Client
from lorad.errors import Conflict, LoradError
from lorad.records.runs import Run
from lorad.tinker.door.app import make_app
from lorad.tinker.door.door import Door, opened
from lorad.tinker.door.guard import Keys
from lorad.tinker.door.messages import FLOAT32, INT64, M
from lorad.tinker.log import LogWriter, follow, read
from lorad.tinker.records import (
    Created,
    Failed,
    Load,
    Loaded,
    Outcome,
    Pass,
    Passed,
    Published,
    Refused,
    Request,
    Result,
    Saved,
    SaveSampler,
    SaveWeights,
    Step,
    Stepped,
    Unload,
    Unloaded,
)
from tests.kit.pool_kit import TINY

ALICE, BOB = "tml-alicealicealice", "tml-bobbobbobbobbob"
BASE = "tiny/base"


class FakeDaemon:
    """A daemon that makes no processes.

    runs: the state of each run by name, and why it ended.
    refuses: the error that it raises when a run is to be made.
    """

    def __init__(self, home: Home) -> None:
        self.home, self.runs = home, dict[str, str]()
        self.specs: list[str] = []
        self.refuses: LoradError | None = None

    def run(self, spec: str, *, name: str, overrides: list[str], **_: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        if name in self.runs:
            raise Conflict(f"{name} exists")
        self.specs.append(" ".join([spec, *overrides]))
        self.home.run(name).root.mkdir(parents=True)
        self.runs[name] = "running"

    def named(self, names: list[str]) -> list[Run]:
        there = [(name, self.runs[name].partition(" ")) for name in names if name in self.runs]
        return [Run(name, state, reason or None) for name, (state, _, reason) in there]

    def discard(self, version: str) -> None:
        run, _, number = version.partition("@")
        self.home.run(run).version(int(number)).rmdir()

    def pause(self, run: str) -> None:
        self.runs[run] = "paused"

    def resume(self, run: str) -> None:
        self.runs[run] = "running"


class FakeLanes:
    """Answers the requests of all runs in the order of seq, while `held` is set.

    versions: how many versions it has published.
    """

    def __init__(self, home: Home) -> None:
        self.home, self.held = home, asyncio.Event()
        self.done: dict[str, list[Request]] = {}
        self.versions = 0
        self.held.set()

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                for path in self.home.runs.glob("*/tinker/requests"):
                    if path.parent.parent.name not in self.done:
                        self.done[path.parent.parent.name] = []
                        group.create_task(self._work(path))
                await asyncio.sleep(0.005)

    async def _work(self, path: Path) -> None:
        done, waiting = self.done[path.parent.parent.name], dict[int, Request]()
        with LogWriter(path.parent / "results") as results:
            following = follow(path, Request)
            told = {result.seq for result, _ in read(path.parent / "results", Result)}
            number = 0
            async for request, _ in following:
                waiting[request.seq] = request
                while number in waiting:
                    await self.held.wait()
                    done.append(waiting.pop(number))
                    if number not in told:
                        outcome = self._outcome(done[-1])
                        self._make_files(RunDir(path.parent.parent), outcome)
                        results.append(Result(number, time.time(), outcome))
                    number += 1

    def _make_files(self, run: RunDir, outcome: Outcome) -> None:
        if isinstance(outcome, Saved):
            (run.root / outcome.directory).mkdir(parents=True)
        if isinstance(outcome, Published):
            run.version(outcome.version).mkdir(parents=True)

    def _outcome(self, request: Request) -> Outcome:
        match request.arguments:
            case Pass() as work:
                metrics = {"loss:sum": float(request.seq)}
                return Passed(np.arange(work.tokens.size, dtype=np.float32), work.lengths, metrics)
            case Step():
                return Stepped({"seq": float(request.seq)})
            case SaveWeights() as save:
                expires = None if save.ttl is None else time.time() + save.ttl
                return Saved(save.name, f"tinker/weights/{save.name}", 10, expires, save.metadata)
            case SaveSampler() as save:
                self.versions += 1
                return Published(self.versions, save.name, save.sampler)
            case Load() as load:
                return Loaded(load.path)
            case Unload():
                return Unloaded()
            case Refused() as refused:
                return Failed(refused.message)
        return Created()


class Caller:
    """Asks a door as one owner."""

    def __init__(self, client: TestClient[Any, Any], key: str) -> None:
        self._client, self._key = client, key

    async def ask(
        self, path: str, body: Any = None, method: str = "POST", status: int = 200, **headers: str
    ) -> Any:
        """Return the answer's JSON, or its bytes; its status must be that."""
        found, answer = await self.asked(path, body, method, **headers)
        assert found == status, (found, answer)
        return answer

    async def asked(
        self, path: str, body: Any = None, method: str = "POST", **headers: str
    ) -> tuple[int, Any]:
        """Return the answer's status, and its JSON or bytes."""
        given = {"data": body} if isinstance(body, bytes) else {"json": body}
        headers |= {"X-API-Key": self._key}
        async with self._client.request(method, f"/api/v1/{path}", headers=headers, **given) as response:
            data = await response.read()
            is_json = response.content_type.endswith("json") and data
            return response.status, await response.json() if is_json else data

    async def session(self) -> str:
        body = {"sdk_version": "0.38.0", "tags": [], "user_metadata": {"who": "test"}}
        return str((await self.ask("create_session", body))["session_id"])

    async def model(self, session: str, number: int = 0, **more: Any) -> str:
        lora = {"rank": 4, "seed": 1, "train_mlp": True, "train_attn": True, "train_unembed": True}
        body = {"session_id": session, "model_seq_id": number, "base_model": BASE, "lora_config": lora} | more
        made = await self.ask("create_model", body)
        assert (await self.result(made["request_id"]))["model_id"] == made["model_id"]
        return str(made["model_id"])

    async def result(self, request: str) -> Any:
        """Poll until it is there."""
        for _ in range(100):
            status, answer = await self.asked("retrieve_future", {"request_id": request})
            if status != 408:
                assert status == 200, (status, answer)
                return answer
        raise AssertionError(f"{request} never ends")

    async def send(self, verb: str, model: str, seq: int, **body: Any) -> str:
        answer = await self.ask(verb, {"model_id": model, "seq_id": seq} | body)
        return str(answer["request_id"])

    async def forward_backward(
        self, model: str, seq: int, data: bytes | None = None, status: int = 200
    ) -> str:
        body = data if data is not None else a_pass(model, seq)
        kind = {"Content-Type": "application/x-protobuf"}
        answer = await self.ask("forward_backward", body, status=status, **kind)
        return str(answer.get("request_id", answer))


def a_pass(model: str, seq: int, change: Callable[[Any], None] | None = None, **fields: Any) -> bytes:
    """Encode a pass of two datums, three and two tokens."""
    message = M["ForwardBackwardRequest"](model_id=model, seq_id=seq, loss_fn="cross_entropy", **fields)
    for tokens in ([5, 6, 7], [8, 9]):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
        put(datum, "target_tokens", np.array([*tokens[1:], 0], np.int64))
        put(datum, "weights", np.ones(len(tokens), np.float32))
    if change is not None:
        change(message)
    return cast("bytes", message.SerializeToString())


def put(datum: Any, name: str, values: np.ndarray) -> None:
    """Give a datum a dense tensor."""
    tensor = datum.loss_fn_inputs[name]
    tensor.dense, tensor.dtype = values.tobytes(), FLOAT32 if values.dtype == np.float32 else INT64
    tensor.shape[:] = values.shape


class World:
    """A door, and those who ask it."""

    def __init__(
        self, door: Door, client: TestClient[Any, Any], daemon: FakeDaemon, lanes: FakeLanes
    ) -> None:
        self.door, self.client, self.daemon, self.lanes = door, client, daemon, lanes
        self.alice, self.bob = Caller(client, ALICE), Caller(client, BOB)
        self.nobody = Caller(client, "tml-nobodynobodynobody")


def home_with_keys(root: Path) -> Home:
    home = Home(root)
    home.tinker.mkdir(parents=True)
    home.runs.mkdir()
    keys = keys_file(home, TinkerSettings())
    keys.write_text(f"alice: {ALICE}\nbob: {BOB}\n")
    keys.chmod(0o600)
    return home


@contextlib.asynccontextmanager
async def running_door(home: Home, daemon: FakeDaemon | None = None, **settings: Any) -> AsyncIterator[World]:
    """A door with lanes, until the block ends."""
    daemon, lanes = daemon or FakeDaemon(home), FakeLanes(home)
    chosen = TinkerSettings(bases={BASE: str(TINY)}, **settings)
    async with opened(home, home.tinker, chosen, client=cast("Client", daemon), hold=0.3) as door:
        watching = asyncio.create_task(lanes.watch())
        async with TestClient(
            TestServer(make_app(door, Keys(keys_file(home, TinkerSettings())).owner_of))
        ) as client:
            yield World(door, client, daemon, lanes)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
