"""Bounds what HTTP connections cost: each has its deadlines, and each user may have a number of them.

aiohttp waits for ever for the head of a request, and for a reader that does not read.
"""

import asyncio
import os
import resource
import socket
from collections import Counter, deque
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from lorad.bounds import Bounds
from lorad.box.ran_out import RanOut
from lorad.errors import Conflict, LoradError, SpecError, to_wire
from lorad.protocol.listener import may_call, uid_behind, uid_of

LOOK = 1.0  # seconds between two looks at all connections
_QUEUE = 1024  # connections that the kernel keeps until they are accepted
_AT_ONCE = 256  # that are accepted before anything else is done
_A_SECOND = 128  # that a user may open, where several share the process; as many more may wait
_REFUSED = 1.0  # seconds in which a connection too many may ask and is answered why not
_EVERYBODY = 0.75  # share of the file descriptors that the process has left at its start
_ADVICE = "Use the lorad command or lorad.client."


class Doorkeeper:
    """Makes the protocol of each connection of a server, and looks at all of them while there are any."""

    def __init__(self, server: web.Server | None, bounds: Bounds) -> None:
        assert server is not None
        self.server = server
        self.bounds = bounds
        self._connections: dict[_Guarded, int | None] = {}  # uid
        self._counts: Counter[int | None] = Counter()
        self._is_looking = False
        left = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
        self._most = int(_EVERYBODY * left)
        asyncio.get_running_loop().set_exception_handler(RanOut())

    def __call__(self) -> RequestHandler:
        return _Guarded(self)

    def let_in(self, guarded: "_Guarded", uid: int | None) -> tuple[str, bool]:
        """Count a connection of a user; return why it is refused, "" if it is not, and whether at once.

        At once is for users who keep opening connections after being refused.
        """
        if not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_later(LOOK, self._look)
        self._connections[guarded] = uid
        self._counts[uid] += 1
        most = self.most(uid)
        count = self._counts[uid]
        total = len(self._connections)
        refusal = f"{self._most} connections are open already" if total > self._most else ""
        if count > most:
            refusal = f"{most} connections are open already" + ("" if uid is None else f" for uid {uid}")
        return refusal, bool(refusal) and (count > 2 * most or total > self._most * 9 // 8)

    def most(self, uid: int | None) -> int:
        """Return how many connections a user may have; None is a user whom the kernel does not know."""
        if uid is None:
            return min(self.bounds.of_own, self._most // 3)
        return self.bounds.of_own if uid == os.getuid() else self.bounds.of_one

    def let_go(self, guarded: "_Guarded") -> None:
        if guarded in self._connections:
            self._counts[self._connections.pop(guarded)] -= 1
            self._counts += Counter()  # forget who has none

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._is_looking = bool(self._connections)
        if self._is_looking:
            loop.call_later(LOOK, self._look)
        for guarded in list(self._connections):
            guarded.look(loop.time())


class Entrance:
    """Accepts the connections of a listener; on a Unix socket, `_A_SECOND` a second from each user.

    Further connections wait for the next second, and are closed where too many wait. asyncio's own entrance
    makes a transport first: with it, one process that connects in a loop fills the queue in which everybody
    waits.
    """

    def __init__(self, door: Doorkeeper, listener: socket.socket) -> None:
        self._door = door
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._opened: Counter[int] = Counter()  # within this second, by uid
        self._waiting: dict[int, deque[socket.socket]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        listener.listen(_QUEUE)
        listener.setblocking(False)
        self._open()

    async def close(self) -> None:
        """Accept no more; whoever was let in is a connection of the server when this returns."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for peers in self._waiting.values():
            for peer in peers:
                peer.close()
        self._waiting.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _open(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                peer, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor is left: later
                self._loop.remove_reader(self._listener)
                self._loop.call_later(LOOK, self._open)
                message = "socket.accept() out of system resource"
                self._loop.call_exception_handler({"message": message, "exception": error})
                return
            self._receive(peer)

    def _receive(self, peer: socket.socket) -> None:
        """Let a connection in, keep it for the next second, or close it.

        Whoever could end this process comes in at any rate, such as the front of a shared gateway, and so
        does whoever comes by a port: only the Doorkeeper bounds their connections.
        """
        if peer.family == socket.AF_UNIX and not may_call(uid := uid_of(peer)):
            if not self._opened:
                self._loop.call_later(1.0, self._begin_second)
            if self._opened[uid] >= _A_SECOND:
                peers = self._waiting.setdefault(uid, deque())
                if len(peers) < _A_SECOND:
                    peers.append(peer)
                else:
                    peer.close()
                return
            self._opened[uid] += 1
        peer.setblocking(False)
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._door, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin_second(self) -> None:
        self._opened.clear()
        waiting = self._waiting
        self._waiting = {}
        for peers in waiting.values():
            for peer in peers:
                self._receive(peer)


class _Guarded(RequestHandler):
    """A connection that is dropped when it costs too much, with the reason in words."""

    def __init__(self, door: Doorkeeper) -> None:
        super().__init__(door.server, loop=asyncio.get_running_loop(), **door.server._kwargs)
        self._door = door
        self._refusal = ""
        self._silent_since = 0.0  # the loop's time since when no request is under way
        self._moved_at = 0.0  # the loop's time when the reader took something last
        self._head_since: float | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._silent_since = self._loop.time()
        peer = transport.get_extra_info("socket")
        uid = None
        if peer is not None:
            uid = uid_of(peer) if peer.family == socket.AF_UNIX else uid_behind(peer)
        self._refusal, is_flood = self._door.let_in(self, uid)
        super().connection_made(transport)
        if is_flood:
            self._door.let_go(self)  # now, or a flood of strangers would take the room of the next user
            self._drop()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.let_go(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal:
            hint = (
                "Close some, or try again in a moment: `lorad list --watch` and `lorad logs -f` keep one "
                "each."
            )
            self._drop(503, Conflict(self._refusal, hint=hint))
            return
        before = self._request_count
        if data and self._head_since is None and not self._is_busy:
            self._head_since = self._loop.time()
        super().data_received(data)
        if self._request_count != before:
            self._head_since = None
            self._silent_since = self._loop.time()

    def look(self, now: float) -> None:
        """Drop the connection when it has been waited for long enough."""
        bounds = self._door.bounds
        transport = self.transport
        if transport is None:
            return
        unsent = transport.get_write_buffer_size()
        if unsent < self._unsent or not self._unsent:
            self._moved_at = now
        self._unsent = unsent
        if self._is_busy:
            self._silent_since = now
        silent = now - self._silent_since
        if self._unsent and now - self._moved_at >= bounds.write:
            transport.abort()
        elif self._refusal:
            if silent >= _REFUSED:
                self._drop()
        elif self._is_busy:
            return
        elif self._head_since is None:
            if silent >= (bounds.idle if self._request_count else bounds.head):
                self._drop()
        elif now - self._head_since >= bounds.head:
            late = f"no whole request within {bounds.head:.0f} seconds"
            self._drop(408, Conflict(late, hint="Send it again, at once."))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer in lorad's form what aiohttp itself rejects."""
        if status >= 500 or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        first = (message or "no HTTP").strip().partition("\n")[0]
        response = in_words(SpecError(f"the request cannot be read: {first[:200]}", hint=_ADVICE), status)
        response.force_close()
        return response

    @property
    def _is_busy(self) -> bool:
        return self._current_request is not None or bool(self._messages)

    def _drop(self, status: int = 0, error: LoradError | None = None) -> None:
        """Close the connection at once; the reader gets as much of `error` as there is room for."""
        transport = self.transport
        if transport is None:
            return
        if error is not None:
            body = msgspec.json.encode({"error": to_wire(error)})
            head = f"HTTP/1.1 {status} \r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        transport.abort()


def in_words(error: LoradError, status: int) -> web.Response:
    """Make the answer that every client of lorad reads as an error."""
    body = msgspec.json.encode({"error": to_wire(error)})
    return web.Response(body=body, status=status, content_type="application/json")
