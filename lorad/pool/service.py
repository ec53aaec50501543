"""The server of a pool. Each connection may have any number of calls at once, answered in any order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec

from lorad.box.ran_out import RanOut
from lorad.errors import Conflict, LoradError, PoolLost, SpecError, to_wire
from lorad.models.turns import WORK
from lorad.pool.state import Pool
from lorad.pool.verbs import PLAIN, STREAMS
from lorad.protocol import frames
from lorad.protocol.calls import CANCEL, VERBS, Answer, Call
from lorad.protocol.frames import BadFrame
from lorad.protocol.listener import may_call, uid_of

log = logging.getLogger(__name__)

LAST_ANSWERS = 1.0  # seconds for callers to take their last answers at the end
# calls that do not count as use of the pool
_ABOUT = frozenset({"hello", "status", "shutdown", "write_uses"})


class PoolService:
    """Serves a pool on a listener until it is stopping. The listener is the caller's to close."""

    def __init__(self, pool: Pool, listener: socket.socket) -> None:
        self._pool = pool
        self._listener = listener
        self._connections: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answer calls until the pool stops: by then what changes a slot has ended, its callers were answered
        and streams are cut.
        """
        accepting = asyncio.create_task(self._accept())
        try:
            await self._pool.stopping.wait()
            self._pool.engine.stop_waiting()
            for fence in self._pool.fences.values():
                await fence.settle()
            if self._answering:
                await asyncio.wait(self._answering, timeout=LAST_ANSWERS)
        finally:
            await _cancelled(accepting, *self._answering, *self._connections)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        ran_out = RanOut()
        while True:
            try:
                peer, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no file descriptors left, or a peer that is gone again
                ran_out.say(error)
                await asyncio.sleep(0.1)
                continue
            if not may_call(uid_of(peer)):
                log.error("a process of another user was turned away")
                peer.close()
                continue
            wire = _Wire(peer)
            task = asyncio.create_task(self._connection(wire))
            _keep(self._connections, task)
            # also of a task that is cancelled before it begins
            task.add_done_callback(partial(lambda peer, _: peer.close(), peer))

    async def _connection(self, wire: _Wire) -> None:
        """Read calls until the peer closes; then end its streams, but let calls that change a slot finish."""
        mine: dict[int, asyncio.Task[None]] = {}
        is_driver = False
        try:
            while True:
                call = await wire.receive()
                if call.run and not is_driver:
                    is_driver = True
                    self._pool.meter.drivers += 1
                self._take(wire, call, mine)
        except ConnectionError:
            pass
        except (OSError, BadFrame) as error:
            log.error("a connection was closed: %s", error)
        finally:
            self._pool.meter.drivers -= is_driver
            try:
                await _cancelled(*mine.values())
            finally:
                await wire.settle()

    def _take(self, wire: _Wire, call: Call, mine: dict[int, asyncio.Task[None]]) -> None:
        """Begin to answer a call of a connection, or cancel one of `mine`, its calls. Raises BadFrame."""
        if call.verb == CANCEL:
            if isinstance(call.args, int) and call.args in mine:
                mine[call.args].cancel()
            return
        if call.id in mine:
            raise BadFrame(f"two calls at once are number {call.id}")

        async def answer() -> None:
            with contextlib.suppress(OSError):  # the peer is gone: its connection ends by itself
                async with contextlib.aclosing(_answers(self._pool, call)) as replies:
                    async for reply in replies:
                        await wire.send(reply)

        task = mine[call.id] = asyncio.create_task(answer())
        task.add_done_callback(lambda _: mine.pop(call.id))
        _keep(self._answering, task)


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _keep(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    tasks.add(task)
    task.add_done_callback(tasks.discard)


class _Wire:
    """One connection, seen from the pool: the frames protocol on a non-blocking socket.

    A slow reader slows down the one who sends to it, nobody else.
    """

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._frames: set[asyncio.Task[None]] = set()

    async def receive(self) -> Call:
        """Return the next call.

        Raises ConnectionError at the end of the stream, BadFrame when it is no call.
        """
        return await frames.read_async(partial(self._loop.sock_recv_into, self._peer), Call)

    async def send(self, answer: Answer) -> None:
        """Send one answer; returns when the peer's buffer has taken all of it. Frames of several answers
        never mix.

        A frame is sent whole even if its sender is cancelled meanwhile: the other calls of this connection
        continue.
        """

        async def send(parts: list[bytes | memoryview]) -> None:
            async with self._sending:
                for part in parts:
                    await self._loop.sock_sendall(self._peer, part)

        frame = asyncio.create_task(send(frames.encode(answer)))
        self._frames.add(frame)
        frame.add_done_callback(self._sent)
        await asyncio.shield(frame)

    async def settle(self) -> None:
        """Give up what is being sent."""
        for frame in self._frames:
            frame.cancel()
        await asyncio.gather(*self._frames, return_exceptions=True)

    def _sent(self, frame: asyncio.Task[None]) -> None:
        self._frames.discard(frame)
        if not frame.cancelled():
            frame.exception()  # its sender has it, unless it was cancelled


async def _answers(pool: Pool, call: Call) -> AsyncGenerator[Answer, None]:
    """Yield everything that goes back to the caller, from a task of its own.

    Raises nothing but cancellation.
    """
    WORK.set(pool.parties.caller(call))
    try:
        kind = VERBS.get(call.verb)
        if kind is None:
            raise Conflict(
                f"a pool has no verb {call.verb!r}", hint="Both sides must be of the same version of lorad."
            )
        if pool.stopping.is_set() and call.verb not in _ABOUT:
            raise PoolLost(
                "the pool is shutting down", hint="Resume the run; the daemon starts another pool."
            )
        if kind.of_run and (not call.run or call.attempt < 1 or (kind.mutates and call.seq < 1)):
            raise Conflict(
                f"{call.verb} needs a run, an attempt and a sequence number", hint="See lorad.protocol.calls."
            )
        try:
            args: Any = frames.converted(call.args, kind.args)
        except msgspec.ValidationError as error:
            raise SpecError(
                f"{call.verb}: {error}", hint="Both sides must be of the same version of lorad."
            ) from None
        with contextlib.nullcontext() if call.verb in _ABOUT else pool.meter.activity():
            if kind.item is None:

                def work() -> Any:
                    return PLAIN[call.verb](pool, call, args)

                if kind.mutates:
                    result = await pool.fence(call.run).once(call, work)
                elif kind.of_run:
                    result = await pool.fence(call.run).read(call, work)
                else:
                    result = await work()
                yield Answer(call.id, "result", result)
                return
            async with contextlib.aclosing(STREAMS[call.verb](pool, call, args)) as items:
                async for item in items:
                    yield Answer(call.id, "item" if isinstance(item, kind.item) else "result", item)
    except LoradError as error:
        log.info("%s of %s: %s: %s", call.verb, call.run or "nobody", type(error).__name__, error)
        yield Answer(call.id, "error", to_wire(error))
    except Exception as error:
        log.exception("%s of %s", call.verb, call.run or "nobody")
        yield Answer(call.id, "error", to_wire(error))
