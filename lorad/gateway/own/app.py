"""The routes: models, completions, chat completions, tokens; each answer names the version that made it."""

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from lorad.box.config import GatewaySettings
from lorad.box.keys import gateway_key
from lorad.box.paths import Home
from lorad.errors import LoradError
from lorad.gateway.access import Access
from lorad.gateway.errors import from_lorad
from lorad.gateway.guard import EVENT_STREAM, VERSION, add_health, answer, arrived, event, guard
from lorad.gateway.limits import BEHIND_FRONT, BODY_BYTES, CONNECTIONS, MOST_REQUESTS, Limits
from lorad.gateway.models import add_models
from lorad.gateway.own.bases import Bases, Peers
from lorad.gateway.own.generation import Asked, Generation, Generator, gathered
from lorad.gateway.own.port import open_port
from lorad.gateway.own.prompts import of_chat, of_completion
from lorad.gateway.own.resolve import Resolver
from lorad.gateway.own.shapes import ChatShape, CompletionShape, Shape
from lorad.gateway.own.tokens import detokenized, tokenized
from lorad.gateway.own.watchdog import watched
from lorad.gateway.params import (
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    NEUTRAL_TOKENIZE,
    ChatWish,
    CompletionWish,
    DetokenizeWish,
    TokenizeWish,
    Wish,
    read,
    read_plain,
)
from lorad.gateway.traffic import Counted, Traffic, reporting
from lorad.http.serve import SocketFile, send, serve
from lorad.protocol import served, traffic

log = logging.getLogger(__name__)

_EVENTS = {"Content-Type": EVENT_STREAM, "Cache-Control": "no-cache"}


@dataclass
class Gateway:
    """The state that all requests share. has_front: the front has looked the name up and names
    its version.
    """

    resolver: Resolver
    access: Access
    bases: Bases = field(default_factory=Bases)
    peers: Peers = field(default_factory=Peers)
    limits: Limits = field(default_factory=Limits)
    traffic: Traffic = field(default_factory=Traffic)
    has_front: bool = False

    @property
    def generator(self) -> Generator:
        return Generator(self.resolver, self.bases, self.peers)

    def counted(self, wish: Wish) -> Counted:
        """Around a request.

        A name that is in the table is counted whatever comes of it, others when they are found.
        """
        counted, names = Counted(self.traffic, streams=wish.stream), self.resolver.names()
        if wish.model in names.aliases or wish.model in names.versions:
            counted.serves(wish.model)
        return counted

    def meant(self, request: web.Request) -> str | None:
        return request.headers.get(VERSION) if self.has_front else None

    async def close(self) -> None:
        await self.peers.close()
        self.resolver.close()


@contextlib.asynccontextmanager
async def answering(home: Home, settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """The gateway of a home that belongs to one user."""
    port = open_port(home) if settings.port == "auto" else settings.port
    access = Access(settings.tokens, key=gateway_key(home) if port else None)
    gateway = Gateway(Resolver(home, home.gateway / served.FILE), access)
    reported = reporting(gateway.traffic, home.gateway / traffic.FILE)
    listeners = [SocketFile(home.gateway_socket), port]
    try:
        async with (
            reported,
            serve(_make_app(gateway), listeners, CONNECTIONS, name="the gateway", ends_with_client=True),
        ):
            yield gateway
    finally:
        await gateway.close()


@contextlib.asynccontextmanager
async def answering_as_owner(home: Home, uid: int) -> AsyncIterator[Gateway]:
    """The one of a user, this process's, behind the front of a shared home. When it hangs, it ends."""
    resolver = Resolver(home, home.gateway_of(uid) / served.FILE)
    gateway = Gateway(resolver, Access(None), limits=Limits(MOST_REQUESTS, MOST_REQUESTS), has_front=True)
    socket = home.gateway_socket_of(uid)
    reported = reporting(gateway.traffic, socket.with_name(traffic.FILE))
    try:
        app = _make_app(gateway)
        async with (
            watched(),
            reported,
            serve(app, [SocketFile(socket)], BEHIND_FRONT, name="the gateway", ends_with_client=True),
        ):
            yield gateway
    finally:
        await gateway.close()


def _make_app(gateway: Gateway) -> web.Application:
    app = web.Application(client_max_size=BODY_BYTES, middlewares=[guard(gateway.access, gateway.limits)])
    add_health(app)
    add_models(app, gateway.resolver.table, gateway.access)
    app.router.add_post("/v1/completions", partial(_complete, gateway))
    app.router.add_post("/v1/chat/completions", partial(_chat, gateway))
    app.router.add_post("/tokenize", partial(_tokenize, gateway))
    app.router.add_post("/detokenize", partial(_detokenize, gateway))
    return app


async def _complete(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    body, meant = await arrived(request), gateway.meant(request)
    wish = read(body, CompletionWish, NEUTRAL_COMPLETION)
    asked = Asked(partial(of_completion, wish), wish.wants_logprobs, len(body), meant)
    with gateway.counted(wish) as counted:
        generation = await gateway.generator.open(wish, asked, counted)
        return await _answered(request, wish, generation, CompletionShape(wish, generation), counted)


async def _chat(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    body, meant = await arrived(request), gateway.meant(request)
    wish = read(body, ChatWish, NEUTRAL_CHAT)
    with gateway.counted(wish) as counted:
        asked = Asked(partial(of_chat, wish), wish.wants_logprobs, len(body), meant)
        generation = await gateway.generator.open(wish, asked, counted)
        return await _answered(request, wish, generation, ChatShape(wish, generation), counted)


async def _tokenize(gateway: Gateway, request: web.Request) -> web.Response:
    wish = read_plain(await arrived(request), TokenizeWish, NEUTRAL_TOKENIZE)
    return answer(await tokenized(gateway.generator, wish, gateway.meant(request)))


async def _detokenize(gateway: Gateway, request: web.Request) -> web.Response:
    wish = read_plain(await arrived(request), DetokenizeWish, {})
    return answer(await detokenized(gateway.generator, wish, gateway.meant(request)))


async def _answered(
    request: web.Request, wish: Wish, generation: Generation, shape: Shape, counted: Counted
) -> web.StreamResponse:
    headers = {VERSION: generation.served.name}
    async with contextlib.aclosing(generation.items):
        if not wish.stream:
            body = shape.whole(await gathered(generation))
            counted.whole()
            return answer(body, headers=headers)
        response = web.StreamResponse(headers=_EVENTS | headers)
        await response.prepare(request)
        # the client has left; closing `items` ends it in the pool
        with contextlib.suppress(ConnectionResetError):
            await _stream(response, generation, shape, counted)
    return response


async def _stream(
    response: web.StreamResponse, generation: Generation, shape: Shape, counted: Counted
) -> None:
    """Send server-sent events. An error can now only be sent as one of them; then `[DONE]` is missing."""
    try:
        async with contextlib.aclosing(generation.pieces(streams=True)) as all_pieces:
            async for pieces in all_pieces:
                await _send_events(response, [chunk for piece in pieces for chunk in shape.chunks(piece)])
        await _send_events(response, shape.last(), b"data: [DONE]\n\n")
        counted.whole()
    except LoradError as error:
        counted.failed()
        log.warning("a stream of %s ended: %s: %s", generation.served.name, type(error).__name__, error)
        await _send_events(response, [from_lorad(error).body])
    await response.write_eof()


async def _send_events(response: web.StreamResponse, events: list[Any], end: bytes = b"") -> None:
    if data := b"".join(map(event, events)) + end:
        await send(response, data)
