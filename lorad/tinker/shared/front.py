"""The front of a home that several users share: it checks whose key a request has, and how much they ask.

That user's own door, which runs as them, does the rest: the front opens no file of a user and reads nothing
of a request.
"""

import contextlib
from collections.abc import AsyncIterator
from functools import partial

from aiohttp import web

from lorad.box.config import TinkerSettings
from lorad.box.keys import keys_file
from lorad.box.paths import Home
from lorad.errors import NotFound
from lorad.gateway.limits import RequestLimits
from lorad.http.client import AnswerCache, DaemonClient
from lorad.http.front import Owners, pass_on, requests_at_once
from lorad.http.serve import SocketFile, serve
from lorad.records.requests import DoorRequest
from lorad.records.versions import DoorOwner
from lorad.tinker.door.errors import HttpError
from lorad.tinker.door.guard import BODY_BYTES, CONNECTIONS, Keys, guarded, healthz

_MOST = 1 << 13  # requests at once, polls among them
_MOST_OF_ONE = 1 << 10  # of one user
_PASSED_ON = ("Content-Type", "Content-Encoding", "Content-Length", "Accept", "X-Idempotency-Key")
_RETURNED = ("Content-Type", "ETag", "X-Repo-Commit", "X-Error-Code")


@contextlib.asynccontextmanager
async def fronting(home: Home, settings: TinkerSettings) -> AsyncIterator[None]:
    """Serve the front within the block. Raises Conflict when another one answers there."""
    limits = RequestLimits(requests_at_once(_MOST), _MOST_OF_ONE)
    keys = Keys(keys_file(home, settings))
    listeners = [SocketFile(home.tinker_socket), settings.port]
    async with (
        contextlib.aclosing(_Users(home)) as users,
        contextlib.aclosing(Owners("Tinker door", home.tinker_socket_of)) as doors,
    ):
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[guarded])
        app.router.add_get("/api/v1/healthz", healthz)
        app.router.add_route("*", "/{path:.*}", partial(_forward, keys, limits, users, doors))
        async with serve(app, listeners, CONNECTIONS, name="the Tinker door", ends_with_client=True):
            yield


class _Users:
    """Asks the daemon which user has a name; the daemon then keeps their door up."""

    def __init__(self, home: Home) -> None:
        self._daemon = DaemonClient(home.socket)
        self.uids: AnswerCache[int] = AnswerCache()

    async def ask(self, owner: str) -> int:
        """Ask anew. Raises DaemonUnreachable, and HttpError 401 for who is no user of this machine."""
        try:
            answer = await self._daemon.ask("/v1/tinker/owner", DoorRequest(owner), DoorOwner)
        except NotFound:
            raise HttpError(401, f"this key is {owner}'s, who is no user of this machine") from None
        self.uids.put(owner, answer.owner_uid)
        return answer.owner_uid

    async def aclose(self) -> None:
        await self._daemon.aclose()


async def _forward(
    keys: Keys, limits: RequestLimits, users: _Users, doors: Owners, request: web.Request
) -> web.StreamResponse:
    """Have the door of the key's owner answer."""
    owner = keys.owner_of(request)
    with limits.place(owner):
        wake = partial(users.ask, owner)
        uid = await users.uids.get(owner, wake, lambda uid: True)
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        body = request.content if request.can_read_body else None
        path = f"/{request.raw_path.lstrip('/')}"
        async with doors.ask(uid, wake, request.method, path, data=body, headers=headers) as reply:
            return await pass_on(request, reply, _RETURNED)
