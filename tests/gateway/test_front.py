"""The front of a shared home before a gateway of an owner's, which may be whatever that user makes of it."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lorad.box.config import GatewaySettings
from lorad.box.paths import Home
from lorad.gateway.errors import ApiError
from lorad.gateway.shared.front import fronting
from lorad.gateway.shared.routes import GatewayRoutes
from lorad.protocol.listener import listen, user_name
from tests.gateway.test_refusals import answers as listens
from tests.gateway.test_refusals import free_port
from tests.kit.gateway_kit import write_table

ENTRY = {"run": "a", "version": 2, "sha256": "", "model_path": "/m", "socket": None}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n"
ASKED = b'{"prompt": "1", "model": "bot"}'


@contextlib.asynccontextmanager
async def owner(home: Home, *sent: bytes) -> AsyncIterator[list[bytes]]:
    """Something that listens where the gateway of this user should, and what it was asked."""
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (
            contextlib.closing(writer),
            contextlib.suppress(asyncio.IncompleteReadError),
        ):  # nothing was asked
            head = await reader.readuntil(b"\r\n\r\n")
            seen.append(head + await reader.readexactly(len(ASKED)))
            for part in sent:
                writer.write(part)

    listener = listen(home.gateway_socket_of(os.getuid()))
    async with await asyncio.start_unix_server(answer, sock=listener):
        yield seen


@contextlib.asynccontextmanager
async def front(home: Home, settings: GatewaySettings | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    write_table(home, {"bot": "a@2"}, {"a@2": ENTRY | {"owner_uid": os.getuid()}})
    connector = aiohttp.UnixConnector(str(home.gateway_socket))
    async with (
        fronting(home, settings or GatewaySettings()),
        aiohttp.ClientSession(connector=connector) as client,
    ):
        yield client


async def told(client: aiohttp.ClientSession, body: bytes = ASKED) -> tuple[int, str, bytes]:
    async with client.post("http://lorad/v1/completions", data=body) as answer:
        return answer.status, answer.content_type, await answer.read()


async def test_front_forwards_the_version_without_credentials(home: Path, tmp_path: Path) -> None:
    world, port, tokens = Home(home), free_port(), tmp_path / "tokens"
    tokens.write_text(f"{user_name(os.getuid())}: correct-horse-battery\n")
    tokens.chmod(0o600)
    headers = {"Authorization": "Bearer correct-horse-battery", "x-lorad-version": "b@1", "Cookie": "secret"}
    body = HEAD % b"application/json" + b"Content-Length: 2\r\nSet-Cookie: x=1\r\n\r\n{}"
    settings, url = GatewaySettings(port, tokens), f"http://127.0.0.1:{port}/v1/completions"
    async with owner(world, body) as seen, front(world, settings), aiohttp.ClientSession() as client:
        while not listens(port):  # noqa: ASYNC110 (ports are polled)
            await asyncio.sleep(0.02)
        async with client.post(url, data=ASKED, headers=headers) as answer:
            assert (answer.status, await answer.read()) == (200, b"{}")
            assert "Set-Cookie" not in answer.headers
    assert seen[0].endswith(ASKED) and b"x-lorad-version: a@2\r\n" in seen[0]
    assert b"secret" not in seen[0] and b"battery" not in seen[0]


async def test_broken_stream_ends_in_an_error(home: Path) -> None:
    world = Home(home)
    begun = HEAD % b"text/event-stream" + b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n"
    async with owner(world, begun), front(world) as client:
        status, kind, data = await told(client)
    assert (status, kind, data[:9]) == (200, "text/event-stream", b"data: 1\n\n")
    assert b'"unavailable"' in data and b"[DONE]" not in data


@pytest.mark.parametrize(
    "rest", [b"Content-Length: 9\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"]
)
async def test_truncated_answer_is_not_taken_as_whole(home: Path, rest: bytes) -> None:
    world = Home(home)
    async with owner(world, HEAD % b"application/json" + rest), front(world) as client:
        with pytest.raises(aiohttp.ClientError):
            await told(client)


@pytest.mark.parametrize(
    "sent", [b"", b"no HTTP\r\n\r\n", b"HTTP/1.1 999 X\r\n\r\n", HEAD + b"x: " + b"y" * 99999]
)
async def test_what_is_no_answer_is_unavailable(home: Path, sent: bytes) -> None:
    world = Home(home)
    async with owner(world, sent), front(world) as client:
        status, kind, data = await told(client)
    assert (status, kind, b"server_error" in data) == (503, "application/json", True)


async def test_answer_is_json_whatever_its_headers_say(home: Path) -> None:
    world = Home(home)
    page = HEAD % b"text/html" + b"Content-Length: 2\r\nContent-Encoding: gzip\r\n\r\n{}"
    async with owner(world, page), front(world) as client:
        assert await told(client) == (200, "application/json", b"{}")


async def test_front_alone_answers_503(home: Path) -> None:
    async with front(Home(home)) as client:
        assert (await told(client))[0] == 503


async def test_only_the_model_of_a_request_is_read(home: Path) -> None:
    bodies = [b"{", b"[]", b'{"model": 1}', b"{}", b'{"model": "bot", "x": ' + b"[" * 99999]
    bodies.append(b'{"model": "' + b"a" * 5000 + b'"}')
    async with front(Home(home)) as client:
        answers = [await told(client, body) for body in bodies]
        missing = await told(client, b'{"model": "nobody"}')
    assert [status for status, *_ in answers] == [400] * len(bodies) and missing[0] == 404


async def test_who_is_another_user_is_sent_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.http.client.uid_of", lambda peer: os.getuid() + 1)
    world = Home(home)
    async with owner(world, b"") as seen, front(world) as client:
        assert ((await told(client))[0], seen) == (503, [])


async def test_token_reaches_only_models_of_its_user(home: Path, tmp_path: Path) -> None:
    world, port, tokens = Home(home), free_port(), tmp_path / "tokens"
    tokens.write_text("eve: correct-horse-battery\n")
    tokens.chmod(0o600)
    url, headers = f"http://127.0.0.1:{port}/v1", {"Authorization": "Bearer correct-horse-battery"}
    async with (
        front(world, GatewaySettings(port, tokens)),
        aiohttp.ClientSession(url + "/", headers=headers) as eve,
    ):
        while not listens(port):  # noqa: ASYNC110 (ports are polled)
            await asyncio.sleep(0.02)
        async with eve.get("models") as answer:
            assert (await answer.json())["data"] == []
        told = {}
        for model in ("bot", "none", "a@2", "none@2"):
            async with (
                eve.get(f"models/{model}") as shown,
                eve.post("completions", json={"model": model}) as asked,
            ):
                told[model] = [(r.status, (await r.text()).replace(model, "")) for r in (shown, asked)]
    assert told["bot"] == told["none"] and {status for status, _ in told["bot"]} == {404}
    assert told["a@2"] == told["none@2"]


async def test_daemon_is_asked_for_hidden_and_missing_alike(home: Path) -> None:
    """What is in the table would be found without it, in a fraction of the time."""
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"version": "a@2", "owner_uid": os.getuid()})

    app = web.Application()
    app.router.add_post("/v1/serving/owner", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(Home(home).socket)).start()
    write_table(Home(home), {"bot": "a@2"}, {"a@2": ENTRY | {"owner_uid": os.getuid()}})
    routes = GatewayRoutes(Home(home))
    try:
        for model in ("bot", "a@2", "none", "none@2") * 2:
            with pytest.raises(ApiError, match=f"`{model}` does not exist"):
                await routes.find(model, "eve", lambda uid: False)
        assert (await routes.find("bot", "me", lambda uid: True)).version == "a@2"
    finally:
        await routes.aclose()
        await runner.cleanup()
    assert asked == [{"model": name, "asker": "eve"} for name in ("bot", "a@2", "none", "none@2")] * 2
