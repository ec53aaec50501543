"""The front of a home that several users share: whose key a request has, and how much that user asks. Their
own door, which runs as them, does the rest; no file of a user is opened here, and nothing of a request is
read.
"""

import contextlib
import logging
import time
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import msgspec
from aiohttp import web

from lorad.box.config import TinkerSettings
from lorad.box.keys import keys_file
from lorad.box.paths import Home
from lorad.client.box_shapes import DoorOwner
from lorad.client.requests import DoorRequest
from lorad.errors import DaemonUnreachable
from lorad.gateway.limits import Limits
from lorad.gateway.shared.owners import Owners, raise_file_limit
from lorad.http.serve import SocketFile, serve
from lorad.tinker.door.errors import HttpError
from lorad.tinker.door.guard import BODY_BYTES, CONNECTIONS, answer, guarded
from lorad.tinker.door.keys import Keys

log = logging.getLogger(__name__)

_ASK_SECONDS = 10.0
_FRESH_SECONDS = 60.0  # the daemon keeps the door of a user up who was asked about within some minutes
_MOST, _MOST_OF_ONE = 1 << 13, 1 << 10  # requests at once, polls among them: of all users, of one
_FILES_OF_ONE = 4  # file descriptors of a request, with room
_GIVEN = ("Content-Type", "Content-Encoding", "Content-Length", "Accept", "X-Idempotency-Key")
_RETURNED = ("Content-Type", "ETag", "X-Repo-Commit", "X-Error-Code")


class _Daemon:
    """Says which user has a name, and has their door up."""

    def __init__(self, home: Home) -> None:
        self._path = home.socket
        connector = aiohttp.UnixConnector(str(home.socket), force_close=True)
        self._http = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=_ASK_SECONDS)
        )
        self._known: dict[str, tuple[int, float]] = {}

    async def uid_of(self, owner: str) -> int:
        """Raises HttpError 401 for who is no user of this machine, and what `ask` raises."""
        uid, asked_at = self._known.get(owner, (-1, float("-inf")))
        if time.monotonic() - asked_at < _FRESH_SECONDS:
            return uid
        try:
            return await self.ask(owner)
        except DaemonUnreachable:
            if uid == -1:
                raise
            return uid

    async def ask(self, owner: str) -> int:
        """Ask anew. Raises DaemonUnreachable, HttpError 401."""
        try:
            data = msgspec.json.encode(DoorRequest(owner))
            async with self._http.post("http://lorad/v1/tinker/owner", data=data) as response:
                body = await response.read()
                if response.status == 404:
                    raise HttpError(401, f"this key is {owner}'s, who is no user of this machine")
                response.raise_for_status()
                uid = msgspec.json.decode(body, type=DoorOwner).owner_uid
        except (OSError, aiohttp.ClientError, msgspec.MsgspecError) as error:  # a timeout is an OSError
            raise DaemonUnreachable(f"no daemon answers on {self._path}: {error}") from error
        self._known[owner] = uid, time.monotonic()
        return uid

    async def close(self) -> None:
        await self._http.close()


class _Front:
    def __init__(self, home: Home, settings: TinkerSettings) -> None:
        self.keys = Keys(keys_file(home, settings))
        self.daemon = _Daemon(home)
        self.owners = Owners("Tinker door", home.tinker_socket_of)
        self.limits = Limits(min(_MOST, raise_file_limit() // _FILES_OF_ONE), _MOST_OF_ONE)

    async def close(self) -> None:
        await self.owners.close()
        await self.daemon.close()


@contextlib.asynccontextmanager
async def fronting(home: Home, settings: TinkerSettings) -> AsyncIterator[None]:
    """The front within the block. Raises Conflict when another one answers there."""
    front = _Front(home, settings)
    try:
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[guarded])
        app.router.add_get("/api/v1/healthz", _healthz)
        app.router.add_route("*", "/{path:.*}", partial(_forward, front))
        listeners = [SocketFile(home.tinker_socket), settings.port]
        async with serve(app, listeners, CONNECTIONS, name="the Tinker door", ends_with_client=True):
            yield
    finally:
        await front.close()


async def _healthz(_: web.Request) -> web.Response:
    return answer({"status": "ok"})


async def _forward(front: _Front, request: web.Request) -> web.StreamResponse:
    owner = front.keys.owner_of(request)
    with front.limits.place(owner):
        uid, wake = await front.daemon.uid_of(owner), partial(front.daemon.ask, owner)
        headers = {name: request.headers[name] for name in _GIVEN if name in request.headers}
        body = request.content if request.can_read_body else None
        path = f"/{request.raw_path.lstrip('/')}"
        asked = front.owners.asked(uid, wake, request.method, path, data=body, headers=headers)
        async with asked as found:
            return await _passed_on(request, found)


async def _passed_on(request: web.Request, found: aiohttp.ClientResponse) -> web.StreamResponse:
    """Byte for byte, as they come. An answer that breaks off breaks off here as well."""
    headers = {name: found.headers[name] for name in _RETURNED if name in found.headers}
    response = web.StreamResponse(status=found.status, headers=headers)
    response.content_length = found.content_length
    await response.prepare(request)
    with contextlib.suppress(ConnectionResetError):  # the client has left
        try:
            async for data in found.content.iter_any():
                await response.write(data)
            await response.write_eof()
        except aiohttp.ClientPayloadError as error:
            log.warning("an answer broke off: %s", error)
            if request.transport is not None:
                request.transport.abort()
    return response
