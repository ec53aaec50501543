"""The front of a shared home before a user's door, which may be whatever that user makes of it."""

import asyncio
import contextlib
import io
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from lorad.box.config import TinkerSettings
from lorad.box.paths import Home
from lorad.errors import NotFound
from lorad.http.bounded import in_words
from lorad.protocol.listener import listen, uid_named, user_name
from lorad.tinker.door.app import answering_as_owner
from lorad.tinker.shared import front as shared_front
from lorad.tinker.shared.front import fronting
from tests.kit.pool_kit import TINY
from tests.tinker.door_kit import ALICE, BASE, BOB, home_with_keys

Client = aiohttp.ClientSession
MINE, KEY = user_name(os.getuid()), {"X-API-Key": ALICE}


@contextlib.asynccontextmanager
async def fronted(root: Path) -> AsyncIterator[tuple[Client, list[web.Request], asyncio.Event]]:
    """A front whose daemon knows this process's user alone, whose door keeps what it was asked, and answers
    polls when the event is set. ALICE is the key of this user, BOB that of nobody.
    """
    seen, slow = list[web.Request](), asyncio.Event()

    async def door(request: web.Request) -> web.Response:
        seen.append(request)
        body = await request.read()
        if request.path.endswith("retrieve_future"):
            await slow.wait()
        return web.json_response({"got": len(body)}, headers={"ETag": "x", "Set-Cookie": "y=1"})

    home = home_with_keys(root)
    async with serving(home.tinker_socket_of(os.getuid()), door), before(home) as client:
        yield client, seen, slow


@contextlib.asynccontextmanager
async def before(home: Home) -> AsyncIterator[Client]:
    """A front before the doors that are there."""
    keys, port = home.tinker / "keys.yaml", unused_port()
    keys.write_text(f"{MINE}: [{ALICE}, tml-otherkeyofalice12]\nnobody-at-all: {BOB}\n")

    async def owner(request: web.Request) -> web.Response:
        if (uid := uid_named((await request.json())["owner"])) is None:
            return in_words(NotFound("no such user"), 404)
        return web.json_response({"owner_uid": uid})

    async with (
        serving(home.socket, owner),
        fronting(home, TinkerSettings(port=port)),
        Client(f"http://127.0.0.1:{port}/api/v1/") as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def serving(path: Path, handler: object) -> AsyncIterator[None]:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app)
    await runner.setup()
    await web.SockSite(runner, listen(path)).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def status(client: Client, path: str = "x", key: str = ALICE, **more: object) -> int:
    for _ in range(200):
        try:
            async with client.post(path, headers={"X-API-Key": key}, **more) as answer:  # type: ignore[arg-type]
                return answer.status
        except aiohttp.ClientConnectorError:  # it listens soon
            await asyncio.sleep(0.01)
    raise AssertionError("nothing listens")


async def test_a_request_reaches_the_door_as_it_came(home: Path) -> None:
    async with fronted(home) as (client, seen, _):
        assert await status(client) == 200
        given = {"X-API-Key": ALICE, "Cookie": "secret", "X-Idempotency-Key": "k", "Accept": "a/b"}
        body = b"x" * 3_000_000
        async with client.put("a%2Fb?limit=2", data=io.BytesIO(body), headers=given) as answer:
            assert await answer.json() == {"got": len(body)}
            assert answer.headers["ETag"] == "x" and "Set-Cookie" not in answer.headers
    got = seen[-1]
    assert (got.method, got.raw_path) == ("PUT", "/api/v1/a%2Fb?limit=2")
    assert (got.headers["X-Idempotency-Key"], got.headers["Accept"]) == ("k", "a/b")
    assert not {"X-API-Key", "Cookie", "Authorization"} & got.headers.keys()


async def test_who_has_no_key_is_not_let_in(home: Path) -> None:
    async with fronted(home) as (client, seen, _):
        assert [await status(client, key=key) for key in ("", "tml-1234567890123456", BOB)] == [401] * 3
        assert seen == []
        async with client.get("/gpt/2/resolve/main/x", headers={"Authorization": f"Bearer {ALICE}"}) as got:
            assert got.status == 200
        async with client.get("healthz") as got:
            assert got.status == 200


async def test_who_is_another_user_is_sent_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.http.client.uid_of", lambda peer: os.getuid() + 1)
    async with fronted(home) as (client, seen, _):
        assert (await status(client), seen) == (503, [])


async def test_who_asks_too_much_gets_429(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one of the requests has ended; other users are counted apart."""
    monkeypatch.setattr(shared_front, "_MOST_OF_ONE", 2)
    async with fronted(home) as (client, seen, slow):
        polls = [asyncio.create_task(status(client, "retrieve_future")) for _ in range(2)]
        while len(seen) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert [await status(client, key=key) for key in (ALICE, BOB)] == [429, 401]
        slow.set()
        assert await asyncio.gather(*polls) == [200, 200]
        assert await status(client) == 200


def test_owners_are_named_by_login_or_number() -> None:
    assert (uid_named(MINE), uid_named("4321")) == (os.getuid(), 4321)
    assert uid_named("nobody-at-all") is None


async def test_a_users_door_stands_behind_the_front(home: Path) -> None:
    """What it has is its user's; tokenizers of bases are for who has a key."""
    world, token = home_with_keys(home), {"Authorization": f"Bearer {ALICE}"}
    world.tinker_socket_of(os.getuid()).parent.mkdir(parents=True)
    settings = TinkerSettings(bases={BASE: str(TINY)})
    async with answering_as_owner(world, settings, os.getuid()) as door, before(world) as client:
        assert await status(client, "telemetry") == 200
        async with client.post("create_session", json={"sdk_version": "0.38.0"}, headers=KEY) as answer:
            session = (await answer.json())["session_id"]
        assert door.state.sessions[session].owner == MINE
        async with client.get("get_server_capabilities", headers=KEY) as answer:
            assert [one["model_name"] for one in (await answer.json())["supported_models"]] == [BASE]
        path = f"/{BASE}/resolve/main/tokenizer.json"
        async with client.head(path, headers=token) as head, client.get(path, headers=token) as got:
            assert await got.read() == (TINY / "tokenizer.json").read_bytes()
            assert head.headers["ETag"] == got.headers["ETag"]
            assert int(head.headers["Content-Length"]) == (TINY / "tokenizer.json").stat().st_size
        async with client.get(path) as refused:
            assert refused.status == 401


async def test_a_door_lets_no_other_user_in(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = home_with_keys(home)
    world.tinker_socket_of(os.getuid()).parent.mkdir(parents=True)
    async with answering_as_owner(world, TinkerSettings(), os.getuid()), before(world) as client:
        assert await status(client, "telemetry") == 200
        monkeypatch.setattr("lorad.tinker.door.guard.may_call", lambda peer: False)
        assert await status(client, "telemetry") == 403
