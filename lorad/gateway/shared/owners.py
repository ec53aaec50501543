"""The processes of owners behind a front: each runs as its user and answers on a socket in a directory of
theirs.
"""

import asyncio
import contextlib
import logging
import resource
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

from lorad.errors import PoolLost
from lorad.protocol.listener import answers, uid_of

AGAIN = "Ask again; the daemon restarts it."
_CONNECT_SECONDS = 5.0
_UP_SECONDS = 15.0  # for the process of an owner to be up
_ANSWER_SECONDS = 3600.0  # between two bytes of one: it keeps the deadlines of pools itself
_POLL_SECONDS = 0.05
_MOST_FILES = 1 << 16  # file descriptors of this process
log = logging.getLogger(__name__)

Wake = Callable[[], Awaitable[object]]


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
    """Whoever waits for the process of one owner holds up nobody who asks another's.

    what: what they are, in messages. socket_of: where the one of a user answers.
    """

    def __init__(self, what: str, socket_of: Callable[[int], Path]) -> None:
        self._what, self._socket_of = what, socket_of
        self._sessions: dict[int, aiohttp.ClientSession] = {}
        self._waking: dict[int, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def asked(
        self,
        uid: int,
        wake: Wake,
        method: str,
        path: str,
        *,
        data: bytes | AsyncIterable[bytes] | None,
        headers: Mapping[str, str],
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer as it comes; leaving early closes the connection and ends the request there.

        wake: has the daemon start it, where it is not up. path: as it came, with its query.
        Raises PoolLost if it is not up or went away, and what `wake` raises.
        """

        async def ask() -> aiohttp.ClientResponse:
            return await self._session(uid).request(
                method, f"http://lorad{path}", data=data, headers=headers, allow_redirects=False
            )

        try:
            response = await ask()
        except aiohttp.ClientConnectorError as error:  # nothing of the body was read
            log.info("the %s of user %d: %s", self._what, uid, error)
            await self._up(uid, wake)
            try:
                response = await ask()
            except (OSError, aiohttp.ClientError) as another:
                raise self._gone(uid, another) from another
        except (OSError, aiohttp.ClientError) as error:
            raise self._gone(uid, error) from error
        async with response:
            if not 200 <= response.status < 600:
                raise self._gone(uid, ValueError(f"it answered with status {response.status}"))
            yield response

    async def close(self) -> None:
        for waking in self._waking.values():
            waking.cancel()
        await asyncio.gather(*self._waking.values(), return_exceptions=True)
        for session in self._sessions.values():
            await session.close()

    def _session(self, uid: int) -> aiohttp.ClientSession:
        session = self._sessions.get(uid)
        if session is None:
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=_ANSWER_SECONDS
            )
            connector = OnlyOf(str(self._socket_of(uid)), uid)
            jar = aiohttp.DummyCookieJar()
            made = aiohttp.ClientSession(
                connector=connector, timeout=timeout, cookie_jar=jar, auto_decompress=False
            )
            session = self._sessions[uid] = made
        return session

    async def _up(self, uid: int, wake: Wake) -> None:
        """Wait until it answers. Raises PoolLost if that takes too long."""
        waking = self._waking.get(uid)
        if waking is None:
            waking = self._waking[uid] = asyncio.create_task(self._wake(uid, wake))
            waking.add_done_callback(lambda _: self._waking.pop(uid))
        await asyncio.shield(waking)

    async def _wake(self, uid: int, wake: Wake) -> None:
        await wake()
        path = self._socket_of(uid)
        try:
            async with asyncio.timeout(_UP_SECONDS):
                while not answers(path):  # noqa: ASYNC110 (sockets are polled)
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise PoolLost(f"the {self._what} of user {uid} is not up", hint=AGAIN) from None

    def _gone(self, uid: int, error: Exception) -> PoolLost:
        why = str(error) or type(error).__name__
        return PoolLost(f"the {self._what} of user {uid} does not answer: {why}", hint=AGAIN)


def raise_file_limit() -> int:
    """Raise the limit of open files as far as this process may, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
