"""`lorad tui --serve`: who comes in and who does not; sessions are few and end with their browsers."""

import asyncio
import re
import signal
from collections.abc import Callable, Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from lorad.bounds import Bounds
from lorad.tui.web.server import SESSIONS, WebSite, listener
from tests.kit.served import Served, Visitor, served, visit
from tests.kit.world import World, world
from tests.test_house import loaded_after


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as one:
        yield one


@pytest.fixture(scope="module")
def server(made: World) -> Iterator[Served]:
    with served(made) as one:
        yield one


async def until(true: Callable[[], Any]) -> None:
    for _ in range(1500):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("not within 30 s")


async def drawn(socket: aiohttp.ClientWebSocketResponse, words: bytes = b"lorad") -> None:
    """These have arrived; unless named, the title of the first screen."""
    async with asyncio.timeout(30):
        seen = b""
        while words not in seen:
            seen += await socket.receive_bytes()


async def words(socket: aiohttp.ClientWebSocketResponse) -> Any:
    """The next message that is not for the terminal."""
    async with asyncio.timeout(30):
        while (message := await socket.receive()).type != aiohttp.WSMsgType.TEXT:
            assert message.type == aiohttp.WSMsgType.BINARY
        return message.json()


def everything(base: str) -> list[str]:
    under = ("", "ws", "page.js", "static/js/textual.js", "static/css/xterm.css", "download/x", "nothing")
    return ["/", "/ws", "/static/js/textual.js", "/favicon.ico", *(base + name for name in under)]


# -- who comes in --------------------------------------------------------------------------------------------
@pytest.mark.system
async def test_every_address_needs_a_key(server: Served) -> None:
    async with visit(server) as guest, aiohttp.ClientSession() as stranger:
        used = server.url.partition("?")[2]
        for path in everything(guest.base):
            for query in ("", "?token=", "?token=wrong", f"?{used}", "?token=%ff%00", "?token=ü"):
                for cookie in ({}, {"Cookie": "lorad=wrong"}, {"Cookie": "lorad="}):
                    async with stranger.get(server.root + path + query, headers=cookie) as answer:
                        assert (answer.status, "printed" in await answer.text()) == (401, True), path + query


@pytest.mark.system
async def test_without_a_key_the_terminal_is_refused(server: Served) -> None:
    async with visit(server) as guest, aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await Visitor(http, server.root, guest.base).terminal()
        assert refused.value.status == 401


async def test_token_works_once_and_sets_a_cookie(server: Served) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.get(server.another(), allow_redirects=False) as answer:
            base, cookie = answer.headers["Location"], SimpleCookie(answer.headers["Set-Cookie"])["lorad"]
            assert answer.status == 303
        assert (cookie["path"], cookie["httponly"], cookie["samesite"]) == (base, True, "Strict")
        assert len(cookie.value) >= 32 and len(base) >= 16 and cookie.value not in server.url
        async with http.get(server.url, allow_redirects=False) as answer:
            assert answer.status == 401


@pytest.mark.parametrize("method", ["HEAD", "POST", "OPTIONS"])
async def test_other_methods_do_not_spend_the_token(server: Served, method: str) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.request(method, server.another()) as answer:
            assert answer.status == 401
        async with http.get(server.url, allow_redirects=False) as answer:
            assert answer.status == 303


async def test_new_token_replaces_only_the_unused_one(server: Served) -> None:
    async with visit(server) as first:
        old = server.another()
        async with visit(server) as second:
            assert await first.status(old.removeprefix(server.root)) == 401
            assert await first.status(first.base) == await second.status(second.base) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", ""]
)
async def test_another_host_name_is_refused_despite_a_key(server: Served, host: str) -> None:
    async with visit(server) as guest:
        for path in everything(guest.base):
            assert await guest.status(path, {"Host": host.format(port=server.root.rpartition(":")[2])}) == 403


async def test_localhost_is_a_name_of_loopback(server: Served) -> None:
    async with visit(server) as guest:
        assert (
            await guest.status(guest.base, {"Host": server.root[7:].replace("127.0.0.1", "localhost")}) == 200
        )


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://127.0.0.1:1", "null", "https://{host}", ""]
)
async def test_a_terminal_for_pages_from_elsewhere_is_refused(server: Served, origin: str) -> None:
    async with visit(server) as guest:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await guest.terminal(origin.format(host=server.root[7:]))
        assert refused.value.status == 403
        assert await guest.status(guest.base, {"Origin": "http://evil.example"}) == 403


async def test_every_answer_forbids_caching_and_referrers(server: Served) -> None:
    async with visit(server) as guest:
        for path, status in (
            (guest.base, 200),
            (f"{guest.base}page.js", 200),
            (f"{guest.base}no", 404),
            ("/", 401),
        ):
            async with guest.http.get(server.root + path) as answer:
                told = answer.headers
                assert (answer.status, told["Cache-Control"], told["Referrer-Policy"]) == (
                    status,
                    "no-store",
                    "no-referrer",
                )
                assert "default-src 'none'" in told["Content-Security-Policy"]


async def test_the_page_needs_nothing_from_elsewhere(server: Served) -> None:
    async with visit(server) as guest, guest.http.get(server.root + guest.base) as answer:
        page = await answer.text()
        assert re.findall(r"\w+://[^/\"]*", page) == [server.root.replace("http", "ws")]
        for name in re.findall(r"(?:src|href)=\"(?!data:|\./\")([^\"]*)|url\(\"([^\"]*)", page):
            assert await guest.status(guest.base + "".join(name)) == 200, name


@pytest.mark.system
async def test_tokens_and_keys_reach_no_process_or_log(server: Served) -> None:
    async with visit(server) as guest, await guest.terminal() as socket:
        await drawn(socket)
        key = next(iter(guest.http.cookie_jar)).value
        everybody = [psutil.Process(server.process.pid), *server.sessions()]
        told = [text for one in everybody for text in (*one.cmdline(), *one.environ().values())]
        server.words.seek(0)
        told.append(server.words.read())
        assert len(everybody) > 1
        assert not [
            text for text in told if key in text or server.url[-20:] in text or guest.base[1:-1] in text
        ]


def test_it_listens_on_loopback_alone(server: Served) -> None:
    listening = [
        c.laddr.ip for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"
    ]
    assert listening == ["127.0.0.1"]


# -- sessions ------------------------------------------------------------------------------------------------
async def test_who_never_ends_a_request_is_sent_away(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.tui.web.server.CONNECTIONS", Bounds(head=0.3))
    stands = asyncio.Event()
    monkeypatch.setattr(WebSite, "_introduce", lambda site: stands.set())
    site = WebSite(home, listener(0))
    running = asyncio.create_task(site.live())
    await stands.wait()
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: ")
    async with asyncio.timeout(30):
        assert b"no whole request" in await reader.read()
    writer.close()
    running.cancel()
    await asyncio.wait([running])


SMUGGLED = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + SMUGGLED,
        b"Content-Length: 1\r\nContent-Length: 2\r\n\r\na" + SMUGGLED,
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        b"Transfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n" + SMUGGLED,
        b"Content-Length: +0\r\n\r\n" + SMUGGLED,
    ],
)
async def test_a_request_within_another_is_never_read(server: Served, sent: bytes) -> None:
    host = server.root.removeprefix("http://")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    writer.write(f"POST / HTTP/1.1\r\nHost: {host}\r\n".encode() + sent)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    assert answer.count(b"HTTP/1.") == 1 and b" 400 " in answer.partition(b"\r\n")[0]


@pytest.mark.system
async def test_a_session_ends_when_its_browser_goes_away(server: Served) -> None:
    await until(lambda: not server.sessions())
    async with visit(server) as guest:
        async with await guest.terminal() as socket:
            await drawn(socket)
            assert server.sessions()[0].cmdline()[1:] == ["-m", "lorad", "tui"]
        await until(lambda: not server.sessions())


@pytest.mark.system
async def test_hanging_session_is_killed_with_its_browser(server: Served) -> None:
    async with visit(server) as guest:
        async with await guest.terminal() as socket:
            await drawn(socket)
            server.sessions()[0].send_signal(signal.SIGSTOP)
        await until(lambda: not server.sessions())


@pytest.mark.parametrize("end", ["quit", "kill"])
async def test_a_session_that_ends_closes_its_browsers_socket(server: Served, end: str) -> None:
    async with visit(server) as guest, await guest.terminal() as socket:
        await drawn(socket)
        if end == "quit":
            await socket.send_json(["stdin", "q"])
        else:
            server.sessions()[0].kill()
        async with asyncio.timeout(30):
            while not socket.closed:
                await socket.receive()


@pytest.mark.system
async def test_screenshot_needs_a_key(server: Served) -> None:
    async with visit(server) as guest, await guest.terminal() as socket, aiohttp.ClientSession() as stranger:
        await drawn(socket)
        for keys, answer in (("\x10", b"earch for commands"), ("screenshot", b"Save an SVG")):
            await socket.send_json(["stdin", keys])
            await drawn(socket, answer)
        await socket.send_json(["stdin", "\r"])
        kind, told = await words(socket)
        assert kind == "open_url"
        url = server.root + told["url"]
        async with stranger.get(url) as refused, guest.http.get(url) as file:
            assert (refused.status, "<svg" in await file.text()) == (401, True)


@pytest.mark.system
async def test_only_so_many_sessions_are_open_at_once(server: Served) -> None:
    await until(lambda: not server.sessions())
    async with visit(server) as guest:
        sockets = [await guest.terminal() for _ in range(SESSIONS)]
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await guest.terminal()
        assert refused.value.status == 503 == await guest.status(guest.base)
        await asyncio.gather(*(socket.close() for socket in sockets))
        for _ in range(1500):
            if await guest.status(guest.base) == 200:
                return
            await asyncio.sleep(0.02)
    raise AssertionError("not within 30 s")


@pytest.mark.system
@pytest.mark.parametrize(
    "signal_number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM, signal.SIGKILL]
)
async def test_sessions_end_with_the_server_however_it_ends(made: World, signal_number: int) -> None:
    with served(made) as server:
        async with visit(server) as guest, await guest.terminal() as socket:
            await drawn(socket)
            sessions = server.sessions()
            server.process.send_signal(signal_number)
            await until(lambda: not any(one.is_running() for one in sessions))
        await until(lambda: server.process.poll() is not None)
        assert server.process.returncode == (-9 if signal_number == signal.SIGKILL else 0)


# -- the command ---------------------------------------------------------------------------------------------
@pytest.mark.system
async def test_a_readonly_server_has_readonly_sessions(made: World) -> None:
    with served(made, "--readonly") as server:
        async with visit(server) as guest, await guest.terminal() as socket:
            await drawn(socket)
            assert server.sessions()[0].cmdline()[-1] == "--readonly"


def test_taken_port_is_an_error(made: World, server: Served) -> None:
    port = server.root.rpartition(":")[2]
    assert (
        f"--port {port}: Address already in use"
        in made.lorad("tui", "--serve", "--port", port, expect=1).stderr
    )


def test_a_port_without_serve_is_refused(made: World) -> None:
    assert "it needs --serve" in made.lorad("tui", "--port", "1", expect=2).stderr


def test_the_terminals_own_dashboard_loads_no_web_server() -> None:
    assert (
        loaded_after("import lorad.cli.commands.dashboard, lorad.tui.app")
        & {"aiohttp", "textual_serve", "jinja2"}
        == set()
    )
