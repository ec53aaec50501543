"""The front of services that run as their users: it passes each request on to one user's process."""

import asyncio
import contextlib
import logging
import resource
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Collection, Mapping
from pathlib import Path

import aiohttp
from aiohttp import web

from lorad.errors import PoolLost
from lorad.http.client import session_over
from lorad.http.serve import send
from lorad.protocol.listener import answers

AGAIN = "Ask again; the daemon restarts it."
_CONNECT_SECONDS = 5.0
_UP_SECONDS = 15.0  # for the process of an owner to be up
_ANSWER_SECONDS = 3600.0  # between two bytes of one: it keeps the deadlines of pools itself
_POLL_SECONDS = 0.05
_MOST_FILES = 1 << 16  # file descriptors of this process
_FILES_OF_ONE = 4  # file descriptors of a request, with room
log = logging.getLogger(__name__)

_Wake = Callable[[], Awaitable[object]]


class Owners:
    """Asks the processes of owners, each on a socket in its owner's directory.

    Whoever waits for the process of one owner holds up nobody who asks another's.
    """

    def __init__(self, what: str, socket_of: Callable[[int], Path]) -> None:
        """Begin with no connection.

        what: what the processes are, in messages.
        socket_of: says where the process of a user answers.
        """
        self._what = what
        self._socket_of = socket_of
        self._sessions: dict[int, aiohttp.ClientSession] = {}
        self._waking: dict[int, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def ask(
        self,
        uid: int,
        wake: _Wake,
        method: str,
        path: str,
        *,
        data: bytes | AsyncIterable[bytes] | None,
        headers: Mapping[str, str],
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer as it comes; leaving early closes the connection and ends the request there.

        wake: has the daemon start the process, where it is not up.
        path: the path as it came, with its query.

        Raises PoolLost if it is not up or went away, and what `wake` raises.
        """
        if uid not in self._sessions:
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=_ANSWER_SECONDS
            )
            self._sessions[uid] = session_over(self._socket_of(uid), timeout, uid=uid)

        async def ask() -> aiohttp.ClientResponse:
            return await self._sessions[uid].request(
                method, f"http://lorad{path}", data=data, headers=headers, allow_redirects=False
            )

        try:
            try:
                response = await ask()
            except aiohttp.ClientConnectorError as error:  # nothing of the body was read
                log.info("the %s of user %d: %s", self._what, uid, error)
                if uid not in self._waking:
                    self._waking[uid] = asyncio.create_task(self._wake(uid, wake))
                    self._waking[uid].add_done_callback(lambda _: self._waking.pop(uid))
                await asyncio.shield(self._waking[uid])
                response = await ask()
        except (OSError, aiohttp.ClientError) as error:
            raise self._gone(uid, str(error) or type(error).__name__) from error
        async with response:
            if not 200 <= response.status < 600:
                raise self._gone(uid, f"it answered with status {response.status}")
            yield response

    async def aclose(self) -> None:
        for waking in self._waking.values():
            waking.cancel()
        await asyncio.gather(*self._waking.values(), return_exceptions=True)
        for session in self._sessions.values():
            await session.close()

    async def _wake(self, uid: int, wake: _Wake) -> None:
        """Wait until the process answers. Raises PoolLost if that takes too long, and what `wake` raises."""
        await wake()
        path = self._socket_of(uid)
        try:
            async with asyncio.timeout(_UP_SECONDS):
                while not answers(path):  # noqa: ASYNC110 (sockets are polled)
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise PoolLost(f"the {self._what} of user {uid} is not up", hint=AGAIN) from None

    def _gone(self, uid: int, why: str) -> PoolLost:
        return PoolLost(f"the {self._what} of user {uid} does not answer: {why}", hint=AGAIN)


async def pass_on(
    request: web.Request,
    answer: aiohttp.ClientResponse,
    names: Collection[str],
    *,
    content_type: str | None = None,
    last_words: bytes = b"",
) -> web.StreamResponse:
    """Send an answer on, byte for byte, as it comes; one that breaks off breaks off for the client, too.

    names: the headers that are sent on, too.
    content_type: what to say of the answer, whatever its own headers say.
    last_words: what to send behind an answer that broke off, which then ends as a whole one does.
    """
    headers = {name: answer.headers[name] for name in names if name in answer.headers}
    response = web.StreamResponse(status=answer.status, headers=headers)
    if content_type is not None:
        response.content_type = content_type
    response.content_length = answer.content_length
    await response.prepare(request)
    with contextlib.suppress(ConnectionResetError):  # the client has left; so does this one, behind the front
        try:
            async for data in answer.content.iter_any():
                await send(response, data)
        except ConnectionResetError:
            raise
        except aiohttp.ClientError as error:
            log.warning("an answer broke off: %s", error)
            if not last_words:
                if request.transport is not None:
                    request.transport.abort()
                return response
            await send(response, last_words)
        await response.write_eof()
    return response


def requests_at_once(most: int) -> int:
    """Return for how many requests, `most` at most, there are file descriptors once their limit is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if files > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return min(most, max(soft, files) // _FILES_OF_ONE)
