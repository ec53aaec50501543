"""What lorad asks a vLLM server, and what it makes of answers that no healthy server gives."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from lorad.engines.remote.dialect import SamplePiece
from lorad.engines.remote.http import Address, Http, ServerGone, ServerRefused
from lorad.engines.vllm import replies
from lorad.engines.vllm.dialect import VllmDialect
from lorad.protocol.batch import Sampling

SHORT = Sampling(max_new_tokens=4, stream=False)
STREAM = Sampling(max_new_tokens=4, stop_token_ids=(1,))
WHOLE = {"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}]}
PART = (
    'data: {"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": '
    "null}]}\n\n"
)


@asynccontextmanager
async def answering(answers: Mapping[str, Any]) -> AsyncIterator[tuple[Http, list[tuple[str, Any]]]]:
    """A server that answers each path with JSON, a number (an error) or the text of a stream; and what it was
    asked.

    A text that ends in dots never ends.
    """
    asked: list[tuple[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append((request.path, await request.json() if request.can_read_body else None))
        found = answers.get(request.path, 404)
        if isinstance(found, int):
            return web.json_response({"error": {"message": "no", "code": found}}, status=found)
        if not isinstance(found, str):
            return web.json_response(found.pop(0) if isinstance(found, list) else found)
        reply = web.StreamResponse()
        await reply.prepare(request)
        await reply.write(found.rstrip(".").encode())
        if found.endswith("..."):
            await asyncio.Event().wait()
        return reply

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    http = Http(Address(url=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    try:
        yield http, asked
    finally:
        await http.close()
        await runner.cleanup()


async def sampled(
    dialect: VllmDialect, http: Http, sampling: Sampling, request: str = "r."
) -> list[SamplePiece]:
    return [piece async for piece in dialect.sample(http, request, "a@1", [5, 6], 2**64 - 1, sampling)]


async def test_all_that_decides_a_sample_is_said() -> None:
    async with answering({"/v1/completions": WHOLE}) as (http, asked):
        assert await sampled(VllmDialect(), http, SHORT) == [SamplePiece([7], [-1.0], "length")]
    body = asked[0][1]
    assert (body["model"], body["prompt"], body["request_id"]) == ("a@1", [5, 6], "r.")
    assert body["seed"] == 2**63 - 1 and body["ignore_eos"] and body["logprobs"] == 0
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, 0, 0.0)


@pytest.mark.parametrize("text", [PART, PART + "data: [DONE]\n\n"])
async def test_a_stream_that_breaks_off_is_no_sample(text: str) -> None:
    async with answering({"/v1/completions": text}) as (http, _):
        with pytest.raises(ServerGone):
            await sampled(VllmDialect(), http, STREAM)


async def test_error_inside_a_stream_is_raised() -> None:
    error = 'data: {"error": {"message": "Engine died", "code": 500}}\n\n'
    async with answering({"/v1/completions": PART + error}) as (http, _):
        with pytest.raises(ServerRefused, match="Engine died"):
            await sampled(VllmDialect(), http, STREAM)


@pytest.mark.parametrize("routes", [{}, {"/abort_requests": {}}])
async def test_sample_that_ignores_an_abort_is_cut(
    routes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorad.engines.vllm.dialect.ABORT_EVERY", 0.001)
    dialect = VllmDialect()
    async with answering({"/v1/completions": PART + "...", **routes}) as (http, asked):
        found = []
        async for piece in dialect.sample(http, "r.", None, [5], 1, STREAM):
            found.append(piece)
            if len(found) == 1:
                await dialect.abort(http, ["r.", "unknown"])
        assert found == [SamplePiece([7], [-1.0]), SamplePiece([], [], "abort")]
        assert ("/abort_requests", {"request_ids": ["cmpl-r.-0"]}) in asked


async def test_empty_abort_is_never_sent() -> None:
    async with answering({}) as (http, asked):
        await VllmDialect().abort(http, ["unknown"])
        assert asked == []


async def test_unload_removes_weights_from_the_engine() -> None:
    loaded: dict[str, Any] = {"/v1/load_lora_adapter": {}, "/v1/unload_lora_adapter": {}}
    orders = [{"results": [[3]]}, {"results": [[3, 9]]}, {"results": ["True"]}]
    dialect = VllmDialect()
    async with answering({**loaded, "/collective_rpc": orders}) as (http, asked):
        await dialect.load(http, "a@1", Path("/x/1"))
        await dialect.load(http, "a@2", Path("/x/2"))
        await dialect.unload(http, "a@2")
    assert asked[-1] == ("/collective_rpc", {"method": "remove_lora", "args": [9]})


async def test_restarted_server_numbers_its_weights_anew() -> None:
    routes: dict[str, Any] = {
        "/v1/load_lora_adapter": {},
        "/v1/unload_lora_adapter": {},
        "/version": {"version": "1"},
    }
    cards = {"data": [{"id": "base", "root": "/m", "parent": None, "max_model_len": 513}]}
    orders = [{"results": [numbers]} for numbers in ([], [1], [], [1], [])]
    dialect = VllmDialect()
    async with answering({**routes, "/v1/models": cards, "/collective_rpc": orders}) as (http, asked):
        for name in ("a@1", "a@1~2"):
            assert (await dialect.abilities(http)).max_tokens == 512
            await dialect.load(http, name, Path("/x/1"))
        await dialect.unload(http, "a@1~2")
    ordered = [body["method"] for path, body in asked if path == "/collective_rpc"]
    assert ordered == ["list_loras"] * 4 + ["remove_lora"]


async def test_loads_and_unloads_work_without_collective_rpc() -> None:
    dialect = VllmDialect()
    async with answering({"/v1/load_lora_adapter": {}, "/v1/unload_lora_adapter": {}}) as (http, asked):
        await dialect.load(http, "a@1", Path("/x/1"))
        await dialect.unload(http, "a@1")
    assert asked[0] == ("/v1/load_lora_adapter", {"lora_name": "a@1", "lora_path": "/x/1"})


async def test_weights_that_give_no_numbers_score_nan() -> None:
    async with answering({"/v1/completions": 400}) as (http, _):
        with pytest.raises(ServerRefused):
            await VllmDialect().score(http, "r.", None, [5], [6, 7])
    failed = {"error": {"message": f"{replies.NOT_FINITE} values are not JSON compliant: nan", "code": 400}}
    async with answering({"/v1/completions": failed}) as (http, _):
        assert np.isnan(await VllmDialect().score(http, "r.", None, [5], [6, 7])).all()


async def test_cache_in_use_is_not_flushed() -> None:
    async with answering({"/reset_prefix_cache": {"success": False}}) as (http, _):
        assert not await VllmDialect().flush(http)
