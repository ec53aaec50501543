"""The server: connections, each with any number of calls at once; answers in whatever order they come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from contextlib import aclosing
from functools import partial

from lorad.pool.serve.dispatch import answers
from lorad.pool.serve.wire import Wire
from lorad.pool.state import Pool
from lorad.protocol.calls import CANCEL, Call
from lorad.protocol.frames import BadFrame
from lorad.protocol.listener import may_call

log = logging.getLogger(__name__)

LAST_ANSWERS = 1.0  # seconds for callers to take their last answers at the end


class Service:
    """Serves a pool on a listener until it is stopping. The listener is the caller's to close."""

    def __init__(self, pool: Pool, listener: socket.socket) -> None:
        self._pool, self._listener = pool, listener
        self._connections: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Returns when the pool stops: what changes a slot has ended, its callers were answered, streams are
        cut.
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
            await cancelled(accepting, *self._answering, *self._connections)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no file descriptors left, or a peer that is gone again
                log.error("a connection could not be accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            if not may_call(peer):
                log.error("a process of another user was turned away")
                peer.close()
                continue
            wire = Wire(peer)
            task = asyncio.create_task(self._connection(wire))
            _keep(self._connections, task)
            task.add_done_callback(partial(_close, wire))  # also of one that is cancelled before it begins

    async def _connection(self, wire: Wire) -> None:
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
                await cancelled(*mine.values())
            finally:
                await wire.settle()

    def _take(self, wire: Wire, call: Call, mine: dict[int, asyncio.Task[None]]) -> None:
        """Begin to answer a call, or end one. mine: of the connection, by their ids. Raises BadFrame."""
        if call.verb == CANCEL:
            if isinstance(call.args, int) and call.args in mine:
                mine[call.args].cancel()
            return
        if call.id in mine:
            raise BadFrame(f"two calls at once are number {call.id}")
        task = mine[call.id] = asyncio.create_task(self._answer(wire, call))
        task.add_done_callback(lambda _: mine.pop(call.id))
        _keep(self._answering, task)

    async def _answer(self, wire: Wire, call: Call) -> None:
        with contextlib.suppress(OSError):  # the peer is gone: its connection ends by itself
            async with aclosing(answers(self._pool, call)) as replies:
                async for reply in replies:
                    await wire.send(reply)


async def cancelled(*tasks: asyncio.Task[None]) -> None:
    """Cancel, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _keep(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _close(wire: Wire, _: asyncio.Task[None]) -> None:
    wire.close()
