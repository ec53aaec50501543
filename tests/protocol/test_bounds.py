"""What a connection may cost: deadlines, how many of them, and readers that do not read."""

import asyncio
import contextlib
import json
import os
import select
import socket
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lorad.bounds import BODY_BYTES, Bounds
from lorad.client.transport import Transport
from lorad.daemon.api.verbs import events as handler
from lorad.daemon.context import Context
from lorad.errors import LoradError
from lorad.http import bounded as http
from lorad.protocol.listener import listen, uid_behind
from lorad.records.runs import Run
from lorad.store import events
from tests.kit.daemon_world import Api, serving, until

QUICK = Bounds(head=0.5, body=0.5, idle=1.0, write=1.0, of_one=8, of_own=80)
GET = b"GET /v1/runs HTTP/1.1\r\nHost: lorad\r\n"
POST = b"POST /v1/runs HTTP/1.1\r\nHost: lorad\r\nContent-Length: 100\r\n\r\n"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LOOK", 0.1)
    monkeypatch.setattr(handler, "IDLE_SECONDS", 0.2)


@contextlib.asynccontextmanager
async def bounded(home: Path, bounds: Bounds = QUICK) -> AsyncIterator[Api]:
    async with serving(home, bounds=bounds) as api:
        yield api


class Peer:
    """One connection, and what comes over it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def end(self, seconds: float = 60.0) -> bytes:
        """What came until the daemon let go of it."""
        data = b""
        async with asyncio.timeout(seconds):
            with contextlib.suppress(ConnectionError):
                while part := await self.reader.read(1 << 16):
                    data += part
        return data


@contextlib.asynccontextmanager
async def peer(ctx: Context, first: bytes = b"") -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_unix_connection(ctx.home.socket)
    writer.write(first)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


async def trickle(one: Peer, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        for byte in data:
            one.writer.write(bytes([byte]))
            await asyncio.sleep(0.1)


def error_of(answer: bytes) -> tuple[int, dict[str, str]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def test_a_silent_connection_is_dropped(home: Path) -> None:
    async with bounded(home) as api, peer(api.ctx) as one:
        assert await one.end() == b""


@pytest.mark.parametrize("begun", [GET, b"G", POST + b"{"], ids=["half a head", "one byte", "half a body"])
async def test_unfinished_request_is_dropped_with_408(home: Path, begun: bytes) -> None:
    async with bounded(home) as api, peer(api.ctx, begun) as one:
        status, error = error_of(await one.end())
        assert status == 408
        assert "within" in error["message"]


@pytest.mark.parametrize("start", [b"", GET + b"X: ", POST], ids=["first byte", "header", "body"])
async def test_a_request_that_trickles_is_dropped(home: Path, start: bytes) -> None:
    async with bounded(home) as api, peer(api.ctx, start) as one:
        feeding = asyncio.create_task(trickle(one, b"GET /v1/runs?all=1" + b"a" * 6000))  # ten minutes of it
        await one.end()
        feeding.cancel()


async def test_connection_silent_after_a_request_is_dropped(home: Path) -> None:
    async with bounded(home) as api, peer(api.ctx, GET + b"\r\n") as one:
        assert (await one.end()).startswith(b"HTTP/1.1 200")


async def test_unfinished_second_request_is_dropped_early(home: Path) -> None:
    async with bounded(home, Bounds(head=0.5, idle=60.0)) as api, peer(api.ctx, GET + b"\r\n") as one:
        await one.reader.readuntil(b"\r\n\r\n")
        one.writer.write(GET)
        assert b" 408 " in await one.end()


async def test_connections_beyond_the_limit_are_refused(home: Path) -> None:
    bounds = Bounds(of_own=8)
    async with bounded(home, bounds) as api, contextlib.AsyncExitStack() as stack:
        followers = [await stack.enter_async_context(peer(api.ctx, follow())) for _ in range(8)]
        for one in followers:
            await one.reader.readuntil(b"idle")
        with pytest.raises(LoradError, match=r"8 connections are open already for uid \d+"):
            await api("run", "{}", source="a.yaml", cwd="/", overrides=[], name=None)
        followers[0].writer.close()
        await followers[0].writer.wait_closed()
        assert await answered(api) == []


async def answered(api: Api) -> list[Run]:
    """List the runs as soon as the daemon has room for the request."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(LoradError):
                found: list[Run] = await api("list")
                return found
            await asyncio.sleep(0.02)


def follow(after: int = -1) -> bytes:
    return f"GET /v1/events?after={after} HTTP/1.1\r\nHost: lorad\r\n\r\n".encode()


async def test_other_users_connections_leave_the_owner_room(home: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to connect as another user")
    async with bounded(home, Bounds(of_one=4)) as api:
        os.chmod(home, 0o755)
        os.chmod(home / "lorad.sock", 0o666)
        theirs = await asyncio.to_thread(connect_as, 54321, home / "lorad.sock", 6)
        assert await api("list") == []
        refused = [answer for one in theirs if b" 503 " in (answer := await asyncio.to_thread(ask, one))]
        assert len(refused) == 2


def connect_as(uid: int, path: Path, count: int) -> list[socket.socket]:
    """Connections of another user, whose credentials are those of the thread that connects."""
    made = [socket.socket(socket.AF_UNIX) for _ in range(count)]
    libc_setresuid(uid)
    try:
        for one in made:
            one.settimeout(10)
            one.connect(str(path))
    finally:
        libc_setresuid(0)
    return made


def libc_setresuid(uid: int) -> None:
    """Set the user id of this thread alone: the function of the C library would change all of the process."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).syscall(117, -1, uid, -1):
        raise OSError(ctypes.get_errno(), "setresuid")


def ask(one: socket.socket) -> bytes:
    with one:
        one.sendall(GET + b"\r\n")
        return one.recv(1 << 16)


async def test_too_large_body_is_refused_on_arrival(home: Path) -> None:
    async with bounded(home) as api:
        with pytest.raises(LoradError, match="larger than"):
            await api("run", "#" * BODY_BYTES, source="a.yaml", cwd="/", overrides=[], name=None)


async def test_too_large_head_is_refused_with_400(home: Path) -> None:
    async with bounded(home) as api, peer(api.ctx, GET + b"X: " + b"a" * 20000 + b"\r\n\r\n") as one:
        status, error = error_of(await one.end())
        assert (status, error["kind"]) == (400, "SpecError")


async def test_deaf_followers_slow_nobody_and_are_dropped(home: Path) -> None:
    async with bounded(home, Bounds(write=1.0)) as api, contextlib.AsyncExitStack() as stack:
        before = await latency(api)
        followers = [stack.enter_context(deaf(api.ctx)) for _ in range(50)]
        for number in range(400):
            events.append(api.ctx.store, None, "noise", {"number": number, "text": "x" * 4000})
        api.ctx.loop.ring()
        usual, worst = await latency(api)
        assert usual < 3 * before[0] + 0.1
        assert worst < 10 * before[1] + 0.6  # who waited for one of them would wait for Bounds.write
        assert await asyncio.to_thread(all_gone, followers)


@contextlib.contextmanager
def deaf(ctx: Context) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(str(ctx.home.socket))
        one.sendall(follow(after=0))
        yield one


async def latency(api: Api) -> tuple[float, float]:
    """Measure the median and the worst time of a list request, in seconds."""
    times = []
    for _ in range(20):
        began = time.perf_counter()
        await api("list")
        times.append(time.perf_counter() - began)
    return statistics.median(times), max(times)


def all_gone(followers: list[socket.socket]) -> bool:
    """The other end of each was closed."""
    deadline = time.monotonic() + 60
    for one in followers:
        poll = select.poll()
        poll.register(one, 0)
        if not poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
            return False
    return True


async def test_header_that_is_no_text_is_answered(home: Path) -> None:
    odd = GET + b"X-Lorad-Protocol: \xe9\r\nConnection: close\r\n\r\n"
    async with bounded(home) as api, peer(api.ctx, odd) as one:
        status, error = error_of(await one.end())
    assert status == 409 and "this command protocol \\udce9" in error["message"]


def test_user_behind_a_port_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accepted(uid: int) -> socket.socket:
            if uid:
                libc_setresuid(uid)
            try:
                clients.append(socket.create_connection(server.getsockname()))
            finally:
                if uid:
                    libc_setresuid(0)
            return server.accept()[0]

        clients = list[socket.socket]()
        for uid in [os.getuid(), *([54321] if os.getuid() == 0 else [])]:
            with accepted(uid) as peer, clients.pop() as client:
                assert uid_behind(peer) == uid
                client.close()
                assert uid_behind(peer) is None


async def test_who_connects_in_a_loop_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a second a user gets in so many times; as many wait for the next one, and others are closed."""
    begin_second, let_in, is_known = http.Entrance._begin_second, list[asyncio.Protocol](), False
    monkeypatch.setattr(http, "uid_of", lambda peer: os.getuid() + 1)
    monkeypatch.setattr(http, "may_call", lambda peer: is_known)
    monkeypatch.setattr(http, "_A_SECOND", 8)
    monkeypatch.setattr(http.Entrance, "_begin_second", lambda entrance: None)

    def door() -> asyncio.Protocol:
        let_in.append(asyncio.Protocol())
        return let_in[-1]

    entrance = http.Entrance(door, listen(tmp_path / "s"))  # type: ignore[arg-type]
    peers = [await asyncio.open_unix_connection(tmp_path / "s") for _ in range(20)]
    assert [await reader.read(1) for reader, _ in peers[16:]] == [b""] * 4
    await until(lambda: len(let_in) == 8)
    begin_second(entrance)
    await until(lambda: len(let_in) == 16)
    is_known = True  # as the front of a shared gateway is
    peers += [await asyncio.open_unix_connection(tmp_path / "s") for _ in range(20)]
    await until(lambda: len(let_in) == 36)
    for _, writer in peers:
        writer.close()
    await entrance.close()


async def test_client_waits_where_many_connect(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen(0)
    before = []
    with pytest.raises(BlockingIOError):
        while True:
            before.append(socket.socket(socket.AF_UNIX))
            before[-1].setblocking(False)
            before[-1].connect(str(tmp_path / "s"))
    asked = asyncio.create_task(asyncio.to_thread(Transport(tmp_path / "s", 60).ask, "GET", "/v1/status"))
    assert not (await asyncio.wait([asked], timeout=0.5))[0]
    peers = [(await asyncio.to_thread(listener.accept))[0] for _ in before]  # the last is the client's
    peer = peers[-1]
    assert peer.recv(1 << 16).startswith(b"GET /v1/status")
    peer.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}")
    assert await asked == {}
    for one in (listener, *peers, *before):
        one.close()
