"""The front of a home that several users share: who asks, how much, and for whose version. That owner's own
gateway, which runs as them, does the rest; no file of a user is opened here, and nothing of a model is in
this process."""

import asyncio
import contextlib
import logging
import os
import resource
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.client_proto import ResponseHandler

from lorad.box.config import GatewaySettings
from lorad.box.paths import Home
from lorad.client.shapes import ServingOwner
from lorad.errors import PoolLost
from lorad.gateway.access import Access
from lorad.gateway.errors import ApiError, from_lorad, no_such_model
from lorad.gateway.guard import EVENT_STREAM, VERSION, add_health, arrived, event, guard, send
from lorad.gateway.limits import BODY_BYTES, CONNECTIONS, MOST_OF_ONE, Limits
from lorad.gateway.models import add_models
from lorad.gateway.params import unfit
from lorad.gateway.server import listening
from lorad.gateway.shared.routes import Routes
from lorad.protocol.listener import FOR_ALL, answers, uid_of

_CONNECT_SECONDS = 5.0
_UP_SECONDS = 15.0  # for the gateway of an owner to be up
_ANSWER_SECONDS = 3600.0  # between two bytes of one: it keeps the deadlines of pools itself
_POLL_SECONDS = 0.05
_AGAIN = "Ask again; the daemon restarts it."
log = logging.getLogger(__name__)
_PASSED_ON = (VERSION, "Cache-Control", "Retry-After")
_MOST_FILES, _FILES_OF_ONE = 1 << 16, 4  # file descriptors of this process; of a request, with room
_MOST_REQUESTS = 1 << 12  # of all users


class OnlyOf(aiohttp.UnixConnector):
    """Connections to a process of one user: root would follow them to any socket that a user's link means."""

    def __init__(self, path: str, uid: int) -> None:
        super().__init__(path, limit=0, force_close=True)
        self._uid = uid

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        protocol: ResponseHandler = await super()._create_connection(req, traces, timeout)
        transport = protocol.transport
        if transport is None or uid_of(transport.get_extra_info("socket")) != self._uid:
            protocol.close()
            error = PermissionError(13, f"who answers is not user {self._uid}")
            raise aiohttp.ClientConnectorError(req.connection_key, error)
        return protocol


class Owners:
    """Whoever waits for the gateway of one owner holds up nobody who asks another's."""

    def __init__(self, home: Home, routes: Routes) -> None:
        self._home, self._routes = home, routes
        self._sessions: dict[int, aiohttp.ClientSession] = {}
        self._waking: dict[int, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def asked(
        self, owner: ServingOwner, path: str, body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer as it comes; leaving early closes the connection and ends the request in the pool.

        Raises PoolLost if the gateway is not up or went away, and what the daemon raises.
        """
        try:
            response = await self._post(owner, path, body)
        except aiohttp.ClientConnectorError as error:
            log.info("the gateway of user %d: %s", owner.owner_uid, error)
            await self._up(owner)
            response = await self._post_again(owner, path, body)
        except (OSError, aiohttp.ClientError) as error:
            raise _gone(owner, error) from error
        async with response:
            if not 200 <= response.status < 600:
                raise _gone(owner, ValueError(f"it answered with status {response.status}"))
            yield response

    async def close(self) -> None:
        for waking in self._waking.values():
            waking.cancel()
        await asyncio.gather(*self._waking.values(), return_exceptions=True)
        for session in self._sessions.values():
            await session.close()

    async def _post(self, owner: ServingOwner, path: str, body: bytes) -> aiohttp.ClientResponse:
        headers = {"Content-Type": "application/json", VERSION: owner.version}
        session = self._session(owner.owner_uid)
        return await session.post(f"http://lorad{path}", data=body, headers=headers, allow_redirects=False)

    async def _post_again(self, owner: ServingOwner, path: str, body: bytes) -> aiohttp.ClientResponse:
        try:
            return await self._post(owner, path, body)
        except (OSError, aiohttp.ClientError) as error:
            raise _gone(owner, error) from error

    def _session(self, uid: int) -> aiohttp.ClientSession:
        session = self._sessions.get(uid)
        if session is None:
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=_ANSWER_SECONDS
            )
            connector = OnlyOf(str(self._home.gateway_socket_of(uid)), uid)
            jar = aiohttp.DummyCookieJar()
            made = aiohttp.ClientSession(
                connector=connector, timeout=timeout, cookie_jar=jar, auto_decompress=False
            )
            session = self._sessions[uid] = made
        return session

    async def _up(self, owner: ServingOwner) -> None:
        """Wait until the gateway answers. Raises PoolLost if that takes too long."""
        waking = self._waking.get(owner.owner_uid)
        if waking is None:
            waking = self._waking[owner.owner_uid] = asyncio.create_task(self._wake(owner))
            waking.add_done_callback(lambda _: self._waking.pop(owner.owner_uid))
        await asyncio.shield(waking)

    async def _wake(self, owner: ServingOwner) -> None:
        await self._routes.ask(owner.version)
        path = self._home.gateway_socket_of(owner.owner_uid)
        try:
            async with asyncio.timeout(_UP_SECONDS):
                while not answers(path):  # noqa: ASYNC110 (sockets are polled)
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise PoolLost(f"the gateway of user {owner.owner_uid} is not up", hint=_AGAIN) from None


def _gone(owner: ServingOwner, error: Exception) -> PoolLost:
    why = str(error) or type(error).__name__
    return PoolLost(f"the gateway of user {owner.owner_uid} does not answer: {why}", hint=_AGAIN)


class _Named(msgspec.Struct):
    """All that is read of a request."""

    model: str


@dataclass
class _Front:
    routes: Routes
    owners: Owners
    access: Access
    limits: Limits = field(default_factory=Limits)


@contextlib.asynccontextmanager
async def fronting(home: Home, settings: GatewaySettings) -> AsyncIterator[_Front]:
    for_all = os.environ.get(FOR_ALL) == "1"
    routes = Routes(home)
    limits = Limits(min(_MOST_REQUESTS, _files() // _FILES_OF_ONE), MOST_OF_ONE)
    front = _Front(
        routes, Owners(home, routes), Access(settings.tokens, for_all=for_all, private=not for_all), limits
    )
    mode = 0o666 if for_all else 0o600
    try:
        async with listening(
            _make_app(front), home.gateway_socket, CONNECTIONS, mode=mode, port=settings.port
        ):
            yield front
    finally:
        await front.owners.close()
        await routes.close()


def _files() -> int:
    """Raise the limit of open files as far as this process may, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def _make_app(front: _Front) -> web.Application:
    app = web.Application(client_max_size=BODY_BYTES, middlewares=[guard(front.access, front.limits)])
    add_health(app)
    add_models(app, front.routes.table, front.access)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        app.router.add_post(path, partial(_forward, front))
    return app


async def _forward(front: _Front, request: web.Request) -> web.StreamResponse:
    body = await arrived(request)
    owner = await front.routes.find(model := _model_in(body))
    if not front.access.viewer(request)(owner.owner_uid):
        raise no_such_model(model)
    async with front.owners.asked(owner, request.path, body) as answer:
        return await _passed_on(request, answer)


def _model_in(body: bytes) -> str:
    """Raises ApiError."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except msgspec.ValidationError as error:
        raise unfit(error) from None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ApiError(400, f"The body is not JSON: {error}.") from None


async def _passed_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Byte for byte, as they come.

    An answer that breaks off breaks off here as well; a stream says so first.
    """
    is_stream = answer.content_type == EVENT_STREAM
    kind = EVENT_STREAM if is_stream else "application/json"
    headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
    response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind} | headers)
    response.content_length = answer.content_length
    await response.prepare(request)
    # the client has left; the owner's gateway sees its own leave
    with contextlib.suppress(ConnectionResetError):
        try:
            async for data in answer.content.iter_any():
                await send(response, data)
        except aiohttp.ClientError as error:
            log.warning("an answer broke off: %s", error)
            await _broken_off(request, response, is_stream=is_stream)
        await response.write_eof()
    return response


async def _broken_off(request: web.Request, response: web.StreamResponse, *, is_stream: bool) -> None:
    """Raises ConnectionResetError for what no word can be added to."""
    if not is_stream:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the answer broke off")
    error = PoolLost("the gateway of the version's owner went away", hint=_AGAIN)
    await send(response, b"\n\n" + event(from_lorad(error).body))
