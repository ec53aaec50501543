"""The routes: models, completions, chat completions; each answer names the version that made it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from lorad.errors import LoradError
from lorad.gateway.access import Access
from lorad.gateway.bases import Bases, Peers
from lorad.gateway.errors import ApiError, from_lorad, no_such_model
from lorad.gateway.generation import Generation, Generator, gathered
from lorad.gateway.limits import BODY_BYTES, BODY_SECONDS, READ_SECONDS, Limits
from lorad.gateway.params import NEUTRAL_CHAT, NEUTRAL_COMPLETION, ChatWish, CompletionWish, Wish, read
from lorad.gateway.prompts import of_chat, of_completion
from lorad.gateway.resolve import Resolver
from lorad.gateway.shapes import ChatShape, CompletionShape, Shape
from lorad.gateway.table import Served

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Shaped = Callable[[Generation], Shape]
VERSION = "x-lorad-version"
EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


@dataclass
class Gateway:
    """What all requests share."""

    resolver: Resolver
    access: Access
    bases: Bases = field(default_factory=Bases)
    peers: Peers = field(default_factory=Peers)
    limits: Limits = field(default_factory=Limits)

    @property
    def generator(self) -> Generator:
        return Generator(self.resolver, self.bases, self.peers)

    async def close(self) -> None:
        await self.peers.close()
        self.resolver.close()


def make_app(gateway: Gateway) -> web.Application:
    app = web.Application(client_max_size=BODY_BYTES, middlewares=[guard(gateway)])
    app.router.add_get("/v1/models", partial(list_models, gateway))
    app.router.add_get("/v1/models/{model:.+}", partial(show_model, gateway))
    app.router.add_post("/v1/completions", partial(complete, gateway))
    app.router.add_post("/v1/chat/completions", partial(chat, gateway))
    return app


def guard(gateway: Gateway) -> Middleware:
    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Nobody gets past it unknown, and nothing but OpenAI's errors gets out."""
        try:
            owner = gateway.access.owner(request)
            with gateway.limits.place(owner) if request.method == "POST" else contextlib.nullcontext():
                return await handler(request)
        except ApiError as error:
            return failed(error)
        except LoradError as error:
            log.warning("%s: %s: %s", request.path, type(error).__name__, error)
            return failed(from_lorad(error))
        except web.HTTPRequestEntityTooLarge:
            return failed(ApiError(413, f"The request is larger than {BODY_BYTES} bytes."))
        except web.HTTPException as error:
            text = f"{request.method} {request.path} is not served here: {error.reason}."
            return failed(ApiError(error.status, text, code="unknown_url"))
        except Exception:
            log.exception("%s %s", request.method, request.path)
            text = "This is a defect of lorad; the gateway's log has the details."
            return failed(ApiError(500, text, kind="server_error"))

    return guarded


def failed(error: ApiError) -> web.Response:
    return answer(error.body, status=error.status, headers=error.headers)


def answer(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, headers=headers, content_type="application/json")


async def list_models(gateway: Gateway, _: web.Request) -> web.Response:
    """Aliases first, then pinned versions and those that aliases mean."""
    names = gateway.resolver.names()
    aliases = [(alias, names.versions[name]) for alias, name in names.aliases.items() if name in names.versions]
    models = [model_of(name, served) for name, served in [*aliases, *names.versions.items()]]
    return answer({"object": "list", "data": models})


async def show_model(gateway: Gateway, request: web.Request) -> web.Response:
    names, asked = gateway.resolver.names(), request.match_info["model"]
    served = names.versions.get(names.aliases.get(asked, asked))
    if served is None:
        raise no_such_model(asked)
    return answer(model_of(asked, served), headers={VERSION: served.name})


def model_of(name: str, served: Served) -> dict[str, Any]:
    """As OpenAI has it; root: the version, parent: its base, as vLLM has it."""
    created = 0
    if served.path is not None:
        with contextlib.suppress(OSError):
            created = int(Path(served.path).stat().st_mtime)
    about = {"root": served.name, "parent": served.model_path}
    return {"id": name, "object": "model", "created": created, "owned_by": "lorad", **about}


async def complete(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    body = await arrived(request)
    wish = read(body, CompletionWish, NEUTRAL_COMPLETION)
    wants = wish.logprobs is not None
    generation = await gateway.generator.open(wish, partial(of_completion, wish), logprobs=wants, size=len(body))
    shape = CompletionShape(wish, generation, logprobs=wants, alternatives=bool(wish.logprobs))
    return await told(request, wish, generation, shape)


async def chat(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    body = await arrived(request)
    wish = read(body, ChatWish, NEUTRAL_CHAT)
    wants = wish.logprobs
    generation = await gateway.generator.open(wish, partial(of_chat, wish), logprobs=wants, size=len(body))
    return await told(request, wish, generation, ChatShape(wish, generation, logprobs=wants))


async def arrived(request: web.Request) -> bytes:
    """The body. Raises ApiError when it takes too long."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, "The request did not arrive in time.") from None


async def told(request: web.Request, wish: Wish, generation: Generation, shape: Shape) -> web.StreamResponse:
    headers = {VERSION: generation.served.name}
    async with aclosing(generation.items):
        if not wish.stream:
            return answer(shape.whole(await gathered(generation)), headers=headers)
        response = web.StreamResponse(headers=EVENTS | headers)
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the client has left; the pool is told by the end of `items`
            await stream(response, generation, shape)
    return response


async def stream(response: web.StreamResponse, generation: Generation, shape: Shape) -> None:
    """Server-sent events. What goes wrong now can only be told as one of them; then `[DONE]` is missing."""
    try:
        async with aclosing(generation.pieces()) as all_pieces:
            async for pieces in all_pieces:
                await send(response, [chunk for piece in pieces for chunk in shape.chunks(piece)])
        await send(response, shape.last(), b"data: [DONE]\n\n")
    except LoradError as error:
        log.warning("a stream of %s ended: %s: %s", generation.served.name, type(error).__name__, error)
        await send(response, [from_lorad(error).body])
    await response.write_eof()


async def send(response: web.StreamResponse, events: list[Any], end: bytes = b"") -> None:
    """At once, in one write. Raises ConnectionResetError for a client that does not read."""
    data = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events) + end
    if not data:
        return
    try:
        async with asyncio.timeout(READ_SECONDS):
            await response.write(data)
    except TimeoutError:
        raise ConnectionResetError("the client does not read") from None
