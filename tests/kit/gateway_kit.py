"""A gateway in a thread of the test, in front of a pool whose table is written by hand, and clients of both
kinds.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from openai import OpenAI
from openai.types import Completion

from lorad.box.config import GatewaySettings
from lorad.box.paths import Home
from lorad.daemon.process.processes import write_json
from lorad.gateway.own.app import Gateway, answering
from lorad.protocol.calls import LoadVersion, Published
from tests.kit.pool_kit import DEADLINE, OPEN, TINY, Running, learn, publish

RUN = "sorter"


def published(running: Running, root: Path, count: int = 2) -> list[Published]:
    """Versions of one run that say different things, kept by the pool."""
    with running.connect(RUN) as run:
        run.call("open", OPEN)
        made = []
        for number in range(count):
            learn(run, seed=number, lr=2e-2)
            version = publish(run, root, number)
            run.call(
                "load_version",
                LoadVersion(version.version, str(directory_of(root, number)), version.sha256, True),
            )
            made.append(version)
    return made


def directory_of(root: Path, number: int) -> Path:
    return root / RUN / "versions" / f"{number:06d}"


def entry(running: Running, root: Path, version: Published, **changes: Any) -> dict[str, Any]:
    number = int(version.version.partition("@")[2])
    return {
        "run": RUN,
        "version": number,
        "sha256": version.sha256,
        "path": str(directory_of(root, number)),
        "model_path": str(TINY),
        "socket": running.config.socket,
    } | changes


def write_table(home: Home, aliases: dict[str, str], versions: dict[str, Any]) -> None:
    home.gateway.mkdir(parents=True, exist_ok=True)
    write_json(home.gateway / "table.json", {"aliases": aliases, "versions": versions})


@contextlib.contextmanager
def running_gateway(home: Home, settings: GatewaySettings | None = None) -> Iterator[Gateway]:
    """`gateway` belongs to its own thread: tests only look at it."""
    started = Future[tuple[Gateway, asyncio.AbstractEventLoop, asyncio.Event]]()

    async def serve() -> None:
        ending = asyncio.Event()
        async with answering(home, settings or GatewaySettings()) as gateway:
            started.set_result((gateway, asyncio.get_running_loop(), ending))
            await ending.wait()

    def live() -> None:
        try:
            asyncio.run(serve())
        except Exception as error:
            started.set_exception(error)

    thread = threading.Thread(target=live)
    thread.start()
    gateway, loop, ending = started.result(DEADLINE)
    try:
        yield gateway
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(DEADLINE)
        assert not thread.is_alive(), "the gateway did not end"


@contextlib.contextmanager
def http(home: Home) -> Iterator[httpx2.Client]:
    """Plain requests on the gateway's socket."""
    transport = httpx2.HTTPTransport(uds=str(home.gateway_socket))
    with httpx2.Client(transport=transport, base_url="http://lorad", timeout=DEADLINE) as client:
        yield client


@contextlib.contextmanager
def openai(home: Home) -> Iterator[OpenAI]:
    """The official client on the gateway's socket; it tries nothing twice."""
    transport = httpx2.HTTPTransport(uds=str(home.gateway_socket))
    with httpx2.Client(transport=transport, timeout=DEADLINE) as inner:
        yield OpenAI(base_url="http://lorad/v1", api_key="none", http_client=inner, max_retries=0)


class World(NamedTuple):
    home: Home
    running: Running
    gateway: Gateway
    versions: list[Published]
    root: Path

    def point(self, alias: str, number: int) -> None:
        """The alias means this version from now on."""
        entries = {v.version: entry(self.running, self.root, v) for v in self.versions}
        write_table(self.home, {alias: self.versions[number].version}, entries)


def greedy(client: OpenAI, model: str, **more: Any) -> str:
    answer: Completion = client.completions.create(model=model, prompt="7 3 1", temperature=0, **more)
    return answer.choices[0].text
