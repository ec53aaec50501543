"""The gateways of owners, as the front of a shared home asks them: one request each connection, to the user
meant.

What another user's process answers is passed on, and nothing of it is believed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

from lorad.box.paths import Home
from lorad.client.shapes import ServingOwner
from lorad.errors import PoolLost
from lorad.gateway.guard import VERSION
from lorad.gateway.shared.routes import Routes
from lorad.protocol.listener import answers, uid_of

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_UP_SECONDS = 15.0  # for the gateway of an owner to be up
_ANSWER_SECONDS = 3600.0  # between two bytes of one: it keeps the deadlines of pools itself
_POLL_SECONDS = 0.05
AGAIN = "Ask again; the daemon restarts it."


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

    @asynccontextmanager
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
            raise PoolLost(f"the gateway of user {owner.owner_uid} is not up", hint=AGAIN) from None


def _gone(owner: ServingOwner, error: Exception) -> PoolLost:
    why = str(error) or type(error).__name__
    return PoolLost(f"the gateway of user {owner.owner_uid} does not answer: {why}", hint=AGAIN)
