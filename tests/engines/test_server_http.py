"""HTTP to a server that dies, hangs or was never there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from lorad.engines.remote.http import Address, Http, ServerGone, ServerRefused, ServerSilent


@pytest.fixture
def slow() -> list[str]:
    """What was asked of the server that it says nothing to."""
    return []


@pytest_asyncio.fixture
async def http(home: Path, slow: list[str]) -> AsyncIterator[Http]:
    """A server that answers /yes, refuses /no, and says nothing to anything else."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/yes":
            return web.json_response({"said": await request.json()})
        if request.path == "/no":
            return web.Response(status=400, text="no, and these are my words")
        slow.append(request.path)
        await asyncio.sleep(60)
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{any}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(home / "s")).start()
    client = Http(Address(socket=home / "s"))
    yield client
    await client.close()
    await runner.cleanup()


async def test_answers_refusals_and_silence_are_distinct(http: Http) -> None:
    assert await http.post("/yes", {"a": [1]}) == {"said": {"a": [1]}}
    with pytest.raises(ServerRefused, match="these are my words") as refused:
        await http.post("/no")
    assert refused.value.code == 400
    with pytest.raises(ServerSilent, match=r"0.05 s"):
        await http.post("/slow", timeout=0.05)


async def test_reset_fails_requests_under_way(http: Http, slow: list[str]) -> None:
    stream = http.events("/slow", {})
    asked = [asyncio.ensure_future(http.post("/slow")), asyncio.ensure_future(anext(stream))]
    async with asyncio.timeout(60):
        while len(slow) < 2:  # noqa: ASYNC110 (what came to the server is polled)
            await asyncio.sleep(0.01)
    await http.reset()
    for answer in asked:
        with pytest.raises(ServerGone):
            async with asyncio.timeout(60):
                await answer
    assert await http.post("/yes", 1) == {"said": 1}


async def test_a_server_that_is_not_there_is_gone(tmp_path: Path) -> None:
    http = Http(Address(socket=tmp_path / "nobody"))
    with pytest.raises(ServerGone):
        await http.get("/yes")
    await http.close()
