"""Has the routes: models, completions, chats and tokens; each answer names the version that made it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from lorad.bounds import Bounds
from lorad.box.config import GatewaySettings
from lorad.box.keys import gateway_key
from lorad.box.paths import Home
from lorad.errors import LoradError, PoolLost
from lorad.gateway import params
from lorad.gateway.access import GatewayAccess
from lorad.gateway.errors import from_lorad, refused
from lorad.gateway.guard import EVENT_STREAM, HEALTH, VERSION, answer, arrived, event, guard, health
from lorad.gateway.limits import BEHIND_FRONT, BODY_BYTES, CONNECTIONS, MOST_REQUESTS, RequestLimits
from lorad.gateway.models import add_models
from lorad.gateway.own.bases import Base
from lorad.gateway.own.generation import Generation, Generator, RequestFacts, gathered
from lorad.gateway.own.port import open_port
from lorad.gateway.own.prompts import of_chat, of_completion, of_tokenize
from lorad.gateway.own.resolve import Resolver
from lorad.gateway.own.shapes import AnswerForm, ChatShape, CompletionShape
from lorad.gateway.own.watchdog import watched
from lorad.gateway.traffic import Counted, Traffic, reporting
from lorad.http.serve import Listener, SocketFile, send, serve
from lorad.protocol import served, traffic

log = logging.getLogger(__name__)

_EVENTS = {"Content-Type": EVENT_STREAM, "Cache-Control": "no-cache"}


@dataclass
class Gateway(Generator):
    """The state that all requests share.

    Attributes:
        has_front: The front has looked the name up already, and names its version.
    """

    access: GatewayAccess = field(kw_only=True)
    limits: RequestLimits = field(default_factory=RequestLimits)
    traffic: Traffic = field(default_factory=Traffic)
    has_front: bool = False

    def version_named_by_front(self, request: web.Request) -> str | None:
        return request.headers.get(VERSION) if self.has_front else None


@contextlib.asynccontextmanager
async def answering(home: Home, settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """Serve the gateway of a home that belongs to one user."""
    port = open_port(home) if settings.port == "auto" else settings.port
    access = GatewayAccess(settings.tokens, key=gateway_key(home) if port else None)
    gateway = Gateway(Resolver(home, home.gateway / served.FILE), access=access)
    listeners = [SocketFile(home.gateway_socket), port]
    async with _serving(gateway, home.gateway / traffic.FILE, listeners, CONNECTIONS):
        yield gateway


@contextlib.asynccontextmanager
async def answering_as_owner(home: Home, uid: int) -> AsyncIterator[Gateway]:
    """Serve the gateway of this process's user, behind the front of a shared home; it ends when it hangs."""
    resolver = Resolver(home, home.gateway_of(uid) / served.FILE)
    limits = RequestLimits(of_one=MOST_REQUESTS)
    gateway = Gateway(resolver, access=GatewayAccess(None), limits=limits, has_front=True)
    socket = home.gateway_socket_of(uid)
    report = socket.with_name(traffic.FILE)
    async with watched(), _serving(gateway, report, [SocketFile(socket)], BEHIND_FRONT):
        yield gateway


@contextlib.asynccontextmanager
async def _serving(
    gateway: Gateway, report: Path, listeners: Sequence[Listener], bounds: Bounds
) -> AsyncIterator[None]:
    """Serve a gateway within the block, count its requests in the file `report`, and close it."""
    app = web.Application(client_max_size=BODY_BYTES, middlewares=[guard(gateway.access, gateway.limits)])
    app.router.add_get(HEALTH, health)
    add_models(app, gateway.resolver.table, gateway.access)
    app.router.add_post("/v1/completions", partial(_generate, gateway, _COMPLETION))
    app.router.add_post("/v1/chat/completions", partial(_generate, gateway, _CHAT))
    app.router.add_post("/tokenize", partial(_tokenize, gateway))
    app.router.add_post("/detokenize", partial(_detokenize, gateway))
    try:
        async with (
            reporting(gateway.traffic, report),
            serve(app, listeners, bounds, name="the gateway", ends_with_client=True),
        ):
            yield
    finally:
        await gateway.peers.close()
        gateway.resolver.close()


class _RequestKind(NamedTuple):
    """A kind of request for text: how it is read, what its prompts are, and how its answer looks."""

    wish: type[params.Wish]
    neutral: Mapping[str, tuple[Any, ...]]
    tokenize: Callable[[Any, Base], list[list[int]]]
    shape: Callable[[Any, Generation], AnswerForm]


_COMPLETION = _RequestKind(params.CompletionWish, params.NEUTRAL_COMPLETION, of_completion, CompletionShape)
_CHAT = _RequestKind(params.ChatWish, params.NEUTRAL_CHAT, of_chat, ChatShape)


async def _generate(gateway: Gateway, kind: _RequestKind, request: web.Request) -> web.StreamResponse:
    """Answer with text, whole or as a stream.

    A name that is in the table is counted whatever comes of the request, others when they are found.
    """
    body = await arrived(request)
    wish = params.read(body, kind.wish, kind.neutral)
    version = gateway.version_named_by_front(request)
    facts = RequestFacts(partial(kind.tokenize, wish), len(body), version)
    with Counted(gateway.traffic, streams=wish.stream) as counted:
        names = gateway.resolver.table.names()
        if wish.model in names.aliases or wish.model in names.versions:
            counted.serves(wish.model)
        generation = await gateway.open(wish, facts, counted)
        shape = kind.shape(wish, generation)
        headers = {VERSION: generation.served.name}
        async with contextlib.aclosing(generation.items):
            if not wish.stream:
                whole = shape.whole(await gathered(generation))
                counted.is_whole = True
                return answer(whole, headers=headers)
            response = web.StreamResponse(headers=_EVENTS | headers)
            await response.prepare(request)
            # the client has left; closing `items` ends it in the pool
            with contextlib.suppress(ConnectionResetError):
                await _stream(response, generation, shape, counted)
        return response


async def _tokenize(gateway: Gateway, request: web.Request) -> web.Response:
    wish = params.read_plain(await arrived(request), params.TokenizeWish, params.NEUTRAL_TOKENIZE)
    served = await gateway.resolver.find(gateway.version_named_by_front(request) or wish.model)
    if served.socket is None:
        raise PoolLost(f"no pool serves {served.name} now", hint="Ask again.")
    base = await gateway.bases.get(served.model_path)
    peer = await gateway.peers.get(served.socket)
    async with base.rendering:
        tokens = await asyncio.to_thread(of_tokenize, wish, base)
    limit = min(base.max_positions, peer.info.max_tokens)
    texts = [base.token_text(token) for token in tokens] if wish.return_token_strs else None
    return answer({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": texts})


async def _detokenize(gateway: Gateway, request: web.Request) -> web.Response:
    wish = params.read_plain(await arrived(request), params.DetokenizeWish, {})
    served = await gateway.resolver.find(gateway.version_named_by_front(request) or wish.model)
    base = await gateway.bases.get(served.model_path)
    if any(token >= base.vocab for token in wish.tokens):
        raise refused("tokens", f"tokens of this model are below {base.vocab}.")
    text = await asyncio.to_thread(base.tokenizer.decode, wish.tokens, skip_special=False)
    return answer({"prompt": text})


async def _stream(
    response: web.StreamResponse, generation: Generation, shape: AnswerForm, counted: Counted
) -> None:
    """Send server-sent events. An error can now only be sent as an event; then `[DONE]` is missing."""
    try:
        async with contextlib.aclosing(generation.pieces(streams=True)) as all_pieces:
            async for pieces in all_pieces:
                await _send_events(response, [chunk for piece in pieces for chunk in shape.chunks(piece)])
        await _send_events(response, shape.last(), b"data: [DONE]\n\n")
        counted.is_whole = True
    except LoradError as error:
        counted.is_failed = True
        log.warning("a stream of %s ended: %s: %s", generation.served.name, type(error).__name__, error)
        await _send_events(response, [from_lorad(error).body])
    await response.write_eof()


async def _send_events(response: web.StreamResponse, events: list[Any], end: bytes = b"") -> None:
    if data := b"".join(map(event, events)) + end:
        await send(response, data)
