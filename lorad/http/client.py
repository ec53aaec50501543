"""Asks processes of this machine over their Unix sockets, within an event loop."""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler

from lorad.errors import DaemonUnreachable, from_wire
from lorad.protocol.listener import uid_of

_ASK_SECONDS = 10.0
_ASK_AT_ONCE = 32
_FRESH_SECONDS = 60.0  # the daemon keeps a user's process up for some minutes after it was asked about them
_REMEMBERED = 1024  # names

T = TypeVar("T")


class _Connector(aiohttp.UnixConnector):
    """Makes connections to the process of one user: root would follow any link of theirs to any socket."""

    def __init__(self, path: Path, uid: int | None, limit: int) -> None:
        super().__init__(str(path), limit=limit, force_close=True)
        self._uid = uid

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        protocol: ResponseHandler = await super()._create_connection(req, traces, timeout)
        transport = protocol.transport
        if self._uid is None:
            return protocol
        if transport is None or uid_of(transport.get_extra_info("socket")) != self._uid:
            protocol.close()
            error = PermissionError(13, f"who answers is not user {self._uid}")
            raise aiohttp.ClientConnectorError(req.connection_key, error)
        return protocol


def session_over(
    path: Path, timeout: aiohttp.ClientTimeout, *, uid: int | None = None, limit: int = 0
) -> aiohttp.ClientSession:
    """Make a session with the process behind a Unix socket, whose answers it neither unpacks nor remembers.

    uid: the user whose process it has to be; None for anybody's.
    limit: how many requests may be under way; 0 for any number.
    """
    return aiohttp.ClientSession(
        connector=_Connector(path, uid, limit),
        timeout=timeout,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


class DaemonClient:
    """Asks the daemon of a home, which answers at once."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        timeout = aiohttp.ClientTimeout(total=_ASK_SECONDS)
        self._session = session_over(socket, timeout, limit=_ASK_AT_ONCE)

    async def ask(self, path: str, body: msgspec.Struct, kind: type[T]) -> T:
        """Return the answer, a `kind`. Raises DaemonUnreachable, and the error that the daemon sends."""
        try:
            data = msgspec.json.encode(body)
            async with self._session.post(f"http://lorad{path}", data=data) as response:
                answer = await response.read()
        except (OSError, aiohttp.ClientError) as error:  # a timeout is an OSError
            raise DaemonUnreachable(f"no daemon answers on {self._socket}: {error}") from error
        try:
            if response.status < 400:
                return msgspec.json.decode(answer, type=kind)
            refusal = from_wire(msgspec.json.decode(answer)["error"])
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            text = f"the daemon answered {response.status}: {answer[:200]!r}"
            raise DaemonUnreachable(text) from error
        raise refusal

    async def aclose(self) -> None:
        await self._session.close()


class AnswerCache(Generic[T]):
    """Remembers the daemon's answers about names while they are fresh, longer while the daemon is away."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, tuple[T, float]] = OrderedDict()

    def put(self, name: str, answer: T) -> None:
        """Remember an answer; the oldest is forgotten where there are too many."""
        self._answers[name] = answer, time.monotonic()
        self._answers.move_to_end(name)
        while len(self._answers) > _REMEMBERED:
            self._answers.popitem(last=False)

    async def get(self, name: str, ask: Callable[[], Awaitable[T]], fits: Callable[[T], bool]) -> T:
        """Return a remembered answer that `fits`, or what the daemon says now. Raises what `ask` raises."""
        answer, asked_at = self._answers.get(name, (None, 0.0))
        if answer is None or not fits(answer):
            return await ask()
        if time.monotonic() - asked_at < _FRESH_SECONDS:
            return answer
        try:
            return await ask()
        except DaemonUnreachable:
            return answer
