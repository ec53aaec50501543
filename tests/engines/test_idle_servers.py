"""A server without work that hangs is noticed before somebody needs it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from lorad.children.host import Host
from lorad.children.process import Child
from lorad.engines.remote import server as servers
from lorad.engines.remote.dialect import Abilities, Dialect, ServerSettings
from lorad.engines.remote.http import Address, Http
from lorad.engines.remote.server import Server
from lorad.servers.table import SERVERS

SERVER = """
import socketserver, sys
from http.server import BaseHTTPRequestHandler

class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(204)
        self.end_headers()
    def address_string(self):
        return "somebody"

socketserver.UnixStreamServer(sys.argv[1], Ready).serve_forever()
"""


class Plain:
    """What little of a dialect an idle server needs."""

    kind = SERVERS["vllm"]

    async def is_ready(self, http: Http) -> bool:
        return await http.status("/ready") < 300

    is_alive = is_ready

    async def loaded(self, http: Http) -> dict[str, str]:
        await http.status("/v1/models")
        return {}

    async def abilities(self, http: Http) -> Abilities:
        return Abilities("1", 64, lora=True, sleep=True)


@pytest_asyncio.fixture
async def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    for name, seconds in (("LOOK_SECONDS", 0.05), ("SILENT_SECONDS", 0.2), ("ANSWER_SECONDS", 1.0)):
        monkeypatch.setattr(servers, name, seconds)
    settings = ServerSettings(
        model=home,
        dtype="float32",
        device="cpu",
        context_length=64,
        max_rank=8,
        targets=("q_proj",),
        slots=1,
        max_versions=1,
        memory_fraction=0.5,
    )
    argv = [sys.executable, "-c", SERVER, str(home / "s")]

    def launch(host: Host | None) -> Child:
        return Child(argv, {}, home / "log", home / "record", home)

    made = Server(0, cast("Dialect", Plain()), settings, Address(socket=home / "s"), launch, lambda: None)
    await made.start()
    made.become("up")
    yield made
    await made.close()


async def test_only_a_silent_idle_server_is_gone(server: Server) -> None:
    gone = asyncio.create_task(server.wait_until_gone())
    await asyncio.sleep(1.0)
    assert not gone.done() and server.in_flight == 0
    assert server.process is not None and server.process.pid is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    async with asyncio.timeout(30):
        assert "does not answer" in await gone
    os.kill(server.process.pid, signal.SIGKILL)


async def test_a_dead_idle_server_of_users_is_gone(server: Server) -> None:
    address = server.http.address
    attached = Server(1, server.dialect, server.settings, address, None, lambda: None)
    attached.become("up")
    gone = asyncio.create_task(attached.wait_until_gone())
    await server.end()
    async with asyncio.timeout(10):
        assert await gone == "it does not answer any more"
    await attached.close()
