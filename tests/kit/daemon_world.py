"""A daemon for tests: a context whose drivers and pools are `daemon_fakes`, and ways to ask it for things."""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorad.bounds import Bounds
from lorad.box.config import Config
from lorad.box.paths import Home
from lorad.client.client import Client
from lorad.daemon.adopt import adopt
from lorad.daemon.context import Context, Patience, Request
from lorad.daemon.daemon import end_tasks, prepare, serve_api
from lorad.daemon.gpu.devices import Device
from lorad.daemon.gpu.state import GpuState
from lorad.daemon.journal import DaemonJournal
from lorad.daemon.process.commands import Commands
from lorad.daemon.process.processes import read_status
from lorad.daemon.process.users import Caller
from lorad.daemon.reconcile import reconcile
from lorad.daemon.runs.create import create, make_directory
from lorad.files import write_whole
from lorad.protocol.journal import JournalWriter
from lorad.protocol.preflight import SpecFacts
from lorad.protocol.structs import learn_structs
from lorad.spec.model import convert
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.db import Store
from lorad.store.ingest import ingest
from lorad.store.rows import RunRow
from tests.kit.fakes.daemon_fakes import FACTS, HELD, Driver
from tests.kit.warm.processes import CLIENT, WarmProcesses

SPEC = "{trainer: {steps: 6}, checkpoint: {every: 2}}"
ENDLESS = "trainer.steps=1000000"  # of a run that is released before the signal which it is to get has come
FAKES = "tests.kit.fakes.daemon_fakes"
COMMANDS = Commands(
    driver=(sys.executable, "-m", FAKES, "driver"),
    pool=(sys.executable, "-m", FAKES, "pool"),
    preflight=(*CLIENT, "-m", FAKES, "preflight"),
    services={"gateway": (sys.executable, "-m", FAKES, "gateway")},
)
QUICK = Patience(pool_gone=0.5, pool_shutdown=1.0, pool_term=2.0, signal_again=1.0, restart=0.0)


OPENED: list[Context] = []  # by `open_context`, until `close_opened`


def close_opened() -> None:
    """Close the databases of this test's contexts."""
    while OPENED:
        ctx = OPENED.pop()
        ctx.readers.close()
        ctx.store.close()


def open_context(home: Path, **config: Any) -> Context:
    """Open a daemon's context without a loop, which `close_opened` closes."""
    learn_structs()  # as a daemon does: its threads read while its loop does
    world = Home(home)
    prepare(world)
    device = Device("cpu", "a CPU", 1 << 30)
    store, journal = Store(world.database), DaemonJournal(world.journal)
    ctx = Context(
        world,
        Config(**config),
        store,
        journal,
        GpuState([device]),
        processes=WarmProcesses(COMMANDS),
        patience=QUICK,
    )
    OPENED.append(ctx)
    return ctx


@contextlib.contextmanager
def looking_often() -> Iterator[None]:
    """Let the daemon look for changes every 0.4 seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lorad.daemon.loop.REST", 0.4)
        yield


@contextlib.asynccontextmanager
async def reconciling(home: Path, **config: Any) -> AsyncIterator[Context]:
    """A daemon without its socket; at the end it goes and leaves everything as it is."""
    ctx = open_context(home, **config)
    adopt(ctx)
    with looking_often():
        loop = asyncio.create_task(reconcile(ctx))
        try:
            yield ctx
        finally:
            ctx.close()
            await loop
            await end_tasks(ctx)
            ctx.store.close()
            ctx.journal.close()


def behave(home: Path, **behaviour: Any) -> None:
    write_whole(home / "behaviour.json", json.dumps(behaviour).encode())


def hold(home: Path, *runs: str) -> None:
    """Have drivers begin no step until `release`, so that what is looked at stays as long as it takes: all of
    them, or those of these runs, where `run@step` is held after that step alone.
    """
    write_whole(home / HELD, " ".join(runs).encode())


def release(home: Path) -> None:
    (home / HELD).unlink()


def submit(
    ctx: Context,
    name: str,
    model: str = "/models/tiny",
    *,
    parameters: int = 1000,
    facts: SpecFacts = SpecFacts(),  # noqa: B008
    **sections: Any,
) -> None:
    spec = convert(
        {"name": name, "model": {"path": model}, "trainer": {"steps": 6}, "checkpoint": {"every": 2}}
        | sections
    )
    request = Request("/", "spec", [], model, "float32", parameters, facts)
    create(ctx, spec, make_directory(ctx, spec, "", request), Caller(os.getuid(), "me"), warnings=[])
    ctx.loop.poke()


def finished(ctx: Context, name: str = "a", **sections: Any) -> RunRow:
    """A run that is over after six steps, without any process: the versions 1001 to 1006, checkpoints at 2,
    4, 6.
    """
    submit(ctx, name, FACTS["model_path"], **sections)
    attempt = runs.begin_attempt(ctx.store, name, resumed_from=None)
    directory = runs.get(ctx.store, name).attempt_dir.root
    directory.mkdir(parents=True)
    params = {"run": name, "run_dir": str(ctx.home.run(name).root), "attempt": attempt, "steps": 6}
    (directory / "params.json").write_text(json.dumps(params | {"resume_step": None, "pool": ""}))
    driver = Driver(directory)
    with JournalWriter(driver.run_dir.journal, name, attempt) as driver.journal:
        driver.begin()
        for driver.step in range(1, 7):
            driver.facts()
    ingest(ctx.store, name, driver.run_dir.journal)
    runs.end_attempt(ctx.store, name, attempt, exit_code=0, signal=None, reason="completed")
    return runs.move(ctx.store, name, Move.END, reason=EndReason.COMPLETED)


async def until(condition: Callable[[], Any], seconds: float = 180.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.02)
    return value


async def until_state(ctx: Context, name: str, state: str) -> RunRow:
    row: RunRow = await until(lambda: (r := runs.get(ctx.store, name)).state == state and r)
    return row


async def idle_pools(ctx: Context, *names: str) -> None:
    """Leave an idle pool for each name: of a run of that name, which ended, on a model of that name."""
    for name in names:
        submit(ctx, name, model=f"/models/{name}")
        await until_state(ctx, name, "ended")


def want(ctx: Context, name: str, what: str) -> None:
    with ctx.store.write():
        runs.move(ctx.store, name, Move.STOP)
        runs.set_fields(ctx.store, name, wanted=what)
    ctx.loop.poke()


def pid_of(ctx: Context, name: str) -> int:
    status = read_status(runs.get(ctx.store, name).attempt_dir) or {}
    return int(status["pid"])


class Api:
    """The client's methods, each in a thread, as the daemon lives in this process."""

    def __init__(self, ctx: Context) -> None:
        self.ctx, self.client = ctx, Client(ctx.home, timeout=60)

    async def __call__(self, method: str, *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, method), *arguments, **options)

    async def run(self, name: str | None, *overrides: str, spec: str = SPEC) -> Any:
        return await self("run", spec, source="a.yaml", cwd="/", overrides=list(overrides), name=name)

    async def until(self, name: str, *states: str) -> Any:
        deadline = time.monotonic() + 180
        while (run := await self("show", name)).state not in states:
            assert time.monotonic() < deadline, f"{name} is still {run.state}"
            await asyncio.sleep(0.05)
        return run


@contextlib.asynccontextmanager
async def serving(home: Path, *, bounds: Bounds = Bounds(), **config: Any) -> AsyncIterator[Api]:  # noqa: B008
    ctx = open_context(home, **config)
    ctx.requests.bounds = bounds
    adopt(ctx)
    with looking_often():
        async with serve_api(ctx):
            loop = asyncio.create_task(reconcile(ctx))
            try:
                yield Api(ctx)
            finally:
                ctx.close()
                await loop
    ctx.store.close()
    ctx.journal.close()
