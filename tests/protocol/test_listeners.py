"""Serving on listeners: sockets that go, ports that somebody else has, and bodies that stay packed."""

import asyncio
import gzip
import os
import socket
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from lorad.bounds import Bounds
from lorad.errors import Conflict
from lorad.http import serve as serving
from lorad.http.client import session_over
from lorad.http.serve import LOCAL, SocketFile, peer_uid, serve
from tests.gateway.test_refusals import answers as listens
from tests.kit.daemon_world import until


def echo() -> web.Application:
    """Make an application that says who asks, and how long the body is."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response([peer_uid(request), len(await request.read())])

    app = web.Application(client_max_size=1 << 20)
    app.router.add_route("*", "/{path:.*}", answer)
    return app


async def asked(path: Path, body: bytes = b"", **headers: str) -> list[int | None]:
    async with (
        session_over(path, aiohttp.ClientTimeout(total=30)) as session,
        session.post("http://lorad/", data=body, headers=headers) as answer,
    ):
        found: list[int | None] = await answer.json()
        return found


async def test_a_socket_is_gone_with_what_served(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with serve(echo(), [SocketFile(path)], Bounds(), name="it"):
        assert await asked(path) == [os.getuid(), 0] and path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(Conflict):
            async with serve(echo(), [SocketFile(path)], Bounds(), name="another"):
                pass
        assert await asked(path) == [os.getuid(), 0]
    assert os.listdir(tmp_path) == []


async def test_packed_bodies_are_not_unpacked(tmp_path: Path) -> None:
    body = gzip.compress(bytes(100_000))
    async with serve(echo(), [SocketFile(tmp_path / "s")], Bounds(), name="it"):
        assert await asked(tmp_path / "s", body, **{"Content-Encoding": "gzip"}) == [os.getuid(), len(body)]


async def test_taken_port_is_served_once_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the socket beside it works; who comes by a port has no uid."""
    monkeypatch.setattr(serving, "_PORT_SECONDS", 0.05)
    with socket.create_server((LOCAL, 0)) as other:
        port = other.getsockname()[1]
        served = serve(echo(), [SocketFile(tmp_path / "s"), port, None], Bounds(), name="it", goodbye=0.1)
        async with served, aiohttp.ClientSession() as session:
            assert await asked(tmp_path / "s") == [os.getuid(), 0]
            other.close()
            await until(lambda: listens(port))
            async with session.post(f"http://{LOCAL}:{port}/", data=b"x") as answer:
                assert await answer.json() == [None, 1]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(LOCAL, port)
