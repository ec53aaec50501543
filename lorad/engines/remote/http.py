"""HTTP to one server, over its Unix socket or a URL; its errors say whether to try again."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from lorad.errors import LoradError

_CONNECT_SECONDS = 5.0
_KEEP_SECONDS = 3.0  # for an idle connection; servers close theirs after 5
_TEXT_LIMIT = 2000  # characters of a server's words that are passed on


class ServerGone(LoradError):
    """Nobody answers, or the connection broke: the server died, is starting or is unreachable."""


class ServerSilent(LoradError):
    """The server took the request and did not answer in time: it may still do what was asked."""


class ServerRefused(LoradError):
    """The server answered with an error: `code` is its HTTP status, and `text` the body of the answer."""

    def __init__(self, message: str, *, status: int, text: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = status
        self.text = text


class NotFinite(LoradError):
    """The server answered without a finite log-probability for every token.

    Its memory cannot be trusted any more: keys and values that held NaN are given to other requests (vLLM).
    """

    def __init__(self, message: str) -> None:
        super().__init__(
            message, hint="The adapter or the base holds NaN or huge weights: use an earlier version."
        )


class Address(msgspec.Struct, frozen=True):
    """The address of a server: a Unix socket, or a URL (http://host:port), and its keys, "" for none.

    admin_key: for routes that change the server, where it has a second key; "" where `key` is for all.
    """

    socket: Path | None = None
    url: str = ""
    key: str = ""
    admin_key: str = ""

    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.url


class Http:
    """Asks one server. Make it inside the event loop that uses it, and `close` it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._base = "http://localhost" if address.socket else address.url.rstrip("/")
        self._session = self._new_session()

    def _new_session(self) -> aiohttp.ClientSession:
        path = str(self.address.socket) if self.address.socket else None
        keep: dict[str, Any] = {"limit": 0, "keepalive_timeout": _KEEP_SECONDS}
        connector = aiohttp.UnixConnector(path=path, **keep) if path else aiohttp.TCPConnector(**keep)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            read_bufsize=1 << 20,
            trust_env=False,
            json_serialize=lambda value: msgspec.json.encode(value).decode(),
        )

    async def reset(self) -> None:
        """Break every connection: what is under way raises ServerGone."""
        old = self._session
        self._session = self._new_session()
        await old.close()

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str, *, timeout: float | None = None) -> Any:
        """Return the JSON (else the text) of a 2xx reply."""
        return await self._ask("GET", path, None, timeout, admin=False)

    async def post(
        self, path: str, body: Any = None, *, timeout: float | None = None, admin: bool = False
    ) -> Any:
        return await self._ask("POST", path, body, timeout, admin=admin)

    async def status(self, path: str, *, timeout: float | None = None) -> int:
        """Return the HTTP status of a GET, whatever it is."""
        async with self._sent("GET", path, None, timeout) as reply:
            return reply.status

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the JSON of each server-sent event until `[DONE]`, or, without `stream`, of the answer."""
        if not body.get("stream"):
            yield await self.post(path, body)
            return
        async with self._sent("POST", path, body, None) as reply:
            await _check(reply, path)
            async for line in reply.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield msgspec.json.decode(data)

    async def _ask(self, method: str, path: str, body: Any, timeout: float | None, *, admin: bool) -> Any:
        async with self._sent(method, path, body, timeout, admin=admin) as reply:
            await _check(reply, path)
            data = await reply.read()
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError:
            return data.decode(errors="replace")

    @contextlib.asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: Any, timeout: float | None, *, admin: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        key = (self.address.admin_key if admin else "") or self.address.key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with asyncio.timeout(timeout):
                async with self._session.request(
                    method, self._base + path, json=body, headers=headers
                ) as reply:
                    yield reply
        except aiohttp.ServerTimeoutError as error:  # a connection did not come to be: nothing was asked
            raise ServerGone(f"{path}: no connection within {_CONNECT_SECONDS:g} s") from error
        except TimeoutError as error:
            raise ServerSilent(f"{path} did not answer within {timeout or 0:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"{path}: {type(error).__name__}: {error}") from error


async def _check(reply: aiohttp.ClientResponse, path: str) -> None:
    if reply.status >= 300:
        text = (await reply.text(errors="replace"))[:_TEXT_LIMIT].strip()
        text = "a page for browsers" if text.startswith("<") else text
        raise ServerRefused(f"{path} answered {reply.status}: {text}", status=reply.status, text=text)
