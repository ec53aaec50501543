"""A home in which nothing moves: runs, pools and devices as code wrote them, at one moment, behind the real
API.

The database is filled from journals by the real ingest, the answers come from the real handlers over a real
socket. Nothing reconciles, so nothing of it is started, adopted or declared lost; what pools and NVML would
say is prepared. `python -m tests.kit.frozen.world DIR` serves it from a directory until Ctrl-C:
`LORAD_HOME=DIR lorad tui` shows it.
"""

import asyncio
import contextlib
import os
import pwd
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from msgspec import Struct

from lorad.box.config import Config
from lorad.box.paths import Home
from lorad.client.client import Client
from lorad.client.transport import RESTART, Json, Transport
from lorad.daemon import daemon
from lorad.daemon.api import server
from lorad.daemon.api.verbs import events
from lorad.daemon.context import Context
from lorad.daemon.gpu.state import GpuState
from lorad.daemon.journal import DaemonJournal
from lorad.errors import DaemonUnreachable
from lorad.records.runs import Queued
from lorad.store.db import Store
from lorad.store.pools import put_cluster_row
from tests.kit.frozen.pools import DEVICES, GIB, GRANT, NODES, SIGHTS, Asleep, gateway, pools
from tests.kit.frozen.runs import LONG, NOW
from tests.kit.frozen.seed import PEOPLE, seed

SHOWN = "/srv/lorad"  # instead of the directory where the world really is
ANSWERS = (  # of an alias, of a version
    "She sells 14 pencils on each of five days, which is 70, and 42 on Saturday.\n\n70 + 42 = 112\n\n#### "
    "112",
    "14 a day and three times as many on Saturday makes 14 + 3 x 14.\n\n#### 56",
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Steady(threading.local):
    """A clock on which everything takes 0.4 s."""

    at = 0.0

    def monotonic(self) -> float:
        self.at += 0.4
        return self.at


@contextlib.contextmanager
def standing_still() -> Iterator[None]:
    """Everything in this process believes that it is NOW, in UTC."""
    with pytest.MonkeyPatch.context() as patch:
        strftime = time.strftime
        patch.setattr(time, "time", lambda: NOW)
        patch.setattr(
            time, "localtime", lambda seconds=None: time.gmtime(NOW if seconds is None else seconds)
        )
        patch.setattr(time, "strftime", lambda format, at=None: strftime(format, at or time.gmtime(NOW)))
        patch.setattr("lorad.tui.serving.chat.time", Steady())
        yield


def open_context(home: Home, share: float) -> Context:
    """Open the context of the thread that answers."""
    daemon.prepare(home)
    seed(home, share)
    ctx = Context(
        home,
        Config(),
        Store(home.database),
        DaemonJournal(home.journal),
        GpuState(list(DEVICES)),
        processes=Asleep(),
    )
    ctx.pools.update({pool.id: pool for pool in pools(home)})
    for node in NODES:
        put_cluster_row(ctx.store, node)
    put_cluster_row(ctx.store, GRANT)
    gateway(home)
    ctx.gpus.sights.seen = dict(SIGHTS)
    ctx.gpus.notes.looked_at = float("inf")
    ctx.loop.started_at = NOW - 26 * 3600
    behind = f"ann used 4.2 device-hours lately, {LONG} 6.0"
    ctx.queue.foreseen = 0.0, {"waits": (NOW + 40 * 60, "sorter"), "waits-too": (NOW + 5 * 3600, "waits")}
    ctx.queue.places = {"waits": Queued(1, 2), "waits-too": Queued(2, 2, behind)}
    return ctx


def prepared(home: Home) -> Any:
    """What this machine would add of its own is as the world has it; a chat is answered without a pool."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/v1/generate":
            return web.json_response(generated(await request.json()))
        response = await handler(request)
        if isinstance(response, web.Response) and isinstance(response.body, bytes):
            body = response.body.replace(str(home.root).encode(), SHOWN.encode())
            if request.path == "/v1/status" and response.status == 200:
                body = msgspec.json.encode(msgspec.json.decode(body) | status())
            return web.Response(body=body, status=response.status, content_type="application/json")
        return response

    return middleware


def status() -> dict[str, Any]:
    disk = {"free": 3 * GIB, "total": 1800 * GIB}
    return {
        "pid": 4242,
        "caller": {"user": "ann", "admin": False},
        "gateway": f"{SHOWN}/gateway.sock",
        "disk": disk,
    }


def generated(body: dict[str, Any]) -> dict[str, Any]:
    name = body["version"]
    text = ANSWERS["@" in name]
    completions = [{"text": text, "tokens": list(range(len(text) // 3)), "finish": "stop"}] * body[
        "sampling"
    ].get("n", 1)
    return {"version": name if "@" in name else "support-bot@200", "completions": completions}


@contextlib.contextmanager
def disguised() -> Iterator[None]:
    """Users are those of the world; the API has its middleware."""
    make_app, known = server.make_app, pwd.getpwuid

    def with_middleware(ctx: Context) -> web.Application:
        app = make_app(ctx)
        app.middlewares.append(prepared(ctx.home))
        return app

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=PEOPLE[uid]) if uid in PEOPLE else known(uid)
        )
        patch.setattr(daemon, "make_app", with_middleware)
        patch.setattr(events, "IDLE_SECONDS", 0.2)  # a cut is noticed soon
        yield


class Daemon(threading.Thread):
    """Answers for a home until `over` is set from its loop."""

    def __init__(self, home: Home, share: float) -> None:
        super().__init__(name="frozen")
        self.home, self.share = home, share
        self.up, self.failed = threading.Event(), list[BaseException]()
        self.loop, self.over = asyncio.new_event_loop(), asyncio.Event()

    def run(self) -> None:
        try:
            self.loop.run_until_complete(self.answer())
        except BaseException as error:
            self.failed.append(error)
        finally:
            self.loop.close()
            self.up.set()

    async def answer(self) -> None:
        ctx = open_context(self.home, self.share)
        try:
            async with daemon.serve_api(ctx):
                self.up.set()
                await self.over.wait()
                ctx.close()
        finally:
            ctx.store.close()
            ctx.journal.close()


class Watched(Transport):
    """Knows how many requests are under way; after `cut` nobody answers any more.

    Both hold for all copies.
    """

    def __init__(self, home: Home) -> None:
        super().__init__(home.socket, 60.0)
        self.state = SimpleNamespace(busy=0, is_cut=False, lock=threading.Lock())

    def cut(self, is_cut: bool) -> None:
        self.state.is_cut = is_cut

    def ask(self, method: str, path: str, body: Struct | None = None) -> Json:
        self._refuse()
        self._count(1)
        try:
            return super().ask(method, path, body)
        finally:
            self._count(-1)

    def stream(self, method: str, path: str, body: Struct | None) -> Iterator[Json]:
        for event in super().stream(method, path, body):
            self._refuse()
            yield event

    def _count(self, more: int) -> None:
        with self.state.lock:
            self.state.busy += more

    def _refuse(self) -> None:
        if self.state.is_cut:
            raise DaemonUnreachable(f"no daemon answers on {SHOWN}/lorad.sock", hint=RESTART)


@contextlib.contextmanager
def frozen_world(root: Path, share: float = 1.0) -> Iterator[Client]:
    """Served by a thread of its own. root: an empty directory whose path fits a socket; share: see `seed`."""
    home = Home(root)
    with disguised():
        thread = Daemon(home, share)
        thread.start()
        thread.up.wait()
        if thread.failed:
            raise thread.failed[0]
        try:
            yield Client(home, transport=Watched(home))
        finally:
            thread.loop.call_soon_threadsafe(thread.over.set)
            thread.join()


@pytest.fixture(scope="module")
def frozen() -> Iterator[Client]:
    """A client of the world, in which it is NOW for everybody."""
    root = Path(tempfile.mkdtemp(prefix="lr-"))
    try:
        with standing_still(), frozen_world(root) as client:
            yield client
    finally:
        shutil.rmtree(root)


def main(directory: str) -> None:
    """At the present moment: the clients of the world have clocks of their own."""
    if "FROZEN_AT" not in os.environ:
        os.execve(sys.executable, [*sys.orig_argv], os.environ | {"FROZEN_AT": str(time.time())})
    root = Path(directory).absolute()
    with frozen_world(root):
        print(f"LORAD_HOME={root} lorad tui", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
