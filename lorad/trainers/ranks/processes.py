"""The processes of a trainer as the pool has them: it starts them, sends calls, and notices their end."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from lorad.children.host import LOST, Process
from lorad.children.process import Child, cause, sweep
from lorad.errors import LoradError, PoolLost, from_wire
from lorad.files import write_whole
from lorad.models.turns import TurnLock
from lorad.protocol import frames
from lorad.protocol.calls import TrainerVerb
from lorad.protocol.heartbeat import HEART
from lorad.trainers.ranks import hang, launch
from lorad.trainers.ranks.calls import Answer, Meeting, RanksReady, Request, answer_to
from lorad.trainers.ranks.config import FAILED, RanksConfig, TrainerDirectories, refusal_file
from lorad.trainers.ranks.spread import Spread

log = logging.getLogger(__name__)

_START_SECONDS = 1800.0  # weights of a large model, from a slow disk
_END_SECONDS = 10.0  # of the launcher, to end all ranks once one has ended
_STOP_SECONDS = 8.0  # the launcher's grace for its ranks, and some
_LOG_LINES = 400
_HINT = "`lorad logs RUN --of trainer` has all that it said. Then resume the run; a new pool starts."

_REPORT = re.compile(r"(?:(?P<node>\S+): )?lorad: (?P<rank>rank \d+) (?P<how>.*)")  # of a launcher or a rank

T = TypeVar("T")


class RankProcesses:
    """The processes of one life of a trainer, on this machine or, by `spread`, on others."""

    def __init__(
        self,
        config: RanksConfig,
        places: TrainerDirectories,
        environment: dict[str, str],
        hang_seconds: float,
        spread: Spread | None = None,
    ) -> None:
        self.config = config
        self.places = places
        self._hang_seconds = hang_seconds
        self.memory: int | None = None  # bytes on all devices, at the last answer
        self.peak: int | None = None  # the most bytes, since it was read last
        self._spread = spread
        self._child: Process = (
            Child(places.command, environment, places.log, places.record, places.private)
            if spread is None
            else spread.team(config, places)
        )
        self._peer: socket.socket | None = None
        self._turn = TurnLock()
        self._watcher: asyncio.Task[None] | None = None
        self._how = self._hung = ""
        self._fine = 0  # so long was the log when all was well

    async def start(self) -> RanksReady:
        """Start the ranks and wait until all are ready. What an earlier life left is ended first.

        Raises what a rank refused its settings with, else PoolLost with the reason from the log.
        """
        started = time.monotonic()
        await asyncio.to_thread(sweep, self.places.record)
        self.places.make()
        write_whole(self.places.config, msgspec.json.encode(self.config), durable=False)
        try:
            async with asyncio.timeout(_START_SECONDS):
                ready = await self._begin()
        except TimeoutError as error:
            raise self._lost(f"was not ready after {_START_SECONDS:.0f} s") from error
        log.info("trainer: %d ranks ready after %.1f s", self.config.ranks, time.monotonic() - started)
        return ready

    @property
    def why(self) -> str:
        """Return why the trainer is not alive; "" while it is."""
        is_alive = self._peer is not None and self._child.is_alive
        return "" if is_alive else self._lost(self._how or "was never started").message

    async def ask(self, verb: TrainerVerb[T], done: Callable[[], object]) -> T:
        """Have the ranks do a verb, one at a time, in turns of their callers; then call `done`.

        A verb that waits is taken back when its caller is cancelled; one that is under way runs to its end.
        Raises what the trainer refused it with, or PoolLost.
        """
        parts = frames.encode(Request(verb))  # type: ignore[arg-type]
        await self._turn.acquire()
        HEART.work(type(verb).__name__)
        exchange = asyncio.create_task(self._exchange(parts, answer_to(verb)))
        exchange.add_done_callback(partial(self._over, done))
        answer = await asyncio.shield(exchange)
        if answer.refusal is not None:
            raise answer.refusal.error()
        return cast(T, answer.result)

    async def end(self) -> None:
        """End the launcher and all ranks."""
        self._how = self._how or "was shut down"
        self._hang_up()
        await self._child.stop(_STOP_SECONDS)
        if self._watcher is not None:
            await self._watcher
        if self._peer is not None:
            self._peer.close()
        if self._spread is not None:
            await self._spread.close()
        self.places.clear()

    async def _begin(self) -> RanksReady:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.places.socket))
            os.chmod(self.places.socket, 0o600)
            listener.listen(1)
            listener.setblocking(False)
            if self._spread is not None:
                await self._spread.open(Path(self.config.settings.model), self.places)
            await self._child.start()
            self._watcher = asyncio.create_task(self._watch())
            accepting = asyncio.create_task(asyncio.get_running_loop().sock_accept(listener))
            try:
                await asyncio.wait({accepting, self._watcher}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                accepting.cancel()  # nothing happens when it is done
                await asyncio.wait({accepting})
            if accepting.cancelled():
                raise await self._loss()
            self._peer, _ = accepting.result()
        self._peer.setblocking(False)
        try:
            if self._spread is not None:
                await self._spread.meet((await self._receive(Meeting)).port)
            return await self._receive(RanksReady)
        except (OSError, frames.BadFrame) as error:
            raise await self._loss() from error

    async def _watch(self) -> None:
        ended = asyncio.create_task(self._child.ended())
        hung = asyncio.create_task(hang.hung(self.places.config, self.config.ranks, self._hang_seconds))
        try:
            await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                self._hung = hung.result()
                log.error("trainer: %s", self._hung)
                await self._child.dump()  # the stacks of all ranks
                await self._child.stop(grace=0.0)  # they do not listen
            how = await ended
        finally:
            hung.cancel()
        self._how = self._how or how
        self._hang_up()

    def _hang_up(self) -> None:
        """Close the connection to the ranks, so that a call that waits for an answer fails."""
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.shutdown(socket.SHUT_RDWR)

    async def _exchange(self, parts: list[bytes | memoryview], kind: type[Answer[T]]) -> Answer[T]:
        if self._peer is None or not self._child.is_alive:
            raise await self._loss()
        try:
            for part in parts:
                await asyncio.get_running_loop().sock_sendall(self._peer, part)
            answer = await self._receive(kind)
        except (OSError, frames.BadFrame) as error:
            raise await self._loss() from error
        if answer.memory is not None:
            self.memory = answer.memory[0]
            self.peak = max(answer.memory[1], self.peak or 0)
        return answer

    def _over(self, done: Callable[[], object], exchange: asyncio.Task[Answer[Any]]) -> None:
        HEART.work("")
        self._turn.release()
        if not exchange.cancelled() and exchange.exception() is None and exchange.result().refusal is None:
            done()

    async def _receive(self, kind: type[T]) -> T:
        """Return the ranks' next message, which shows that all is well with them."""
        assert self._peer is not None
        recv_into = partial(asyncio.get_running_loop().sock_recv_into, self._peer)
        message = await frames.read_async(recv_into, kind)
        self._fine = self._child.output.size()
        return message

    async def _loss(self) -> LoradError:
        """End the unusable ranks; return the error to raise once none is left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self._child.ended()
        await self._child.stop(grace=1.0)
        refusal = refusal_file(self.places.config)
        if refusal.exists():
            return from_wire(json.loads(refusal.read_bytes()))
        return self._lost(self._how or await self._child.ended())

    def _lost(self, how: str) -> PoolLost:
        """Make the error of a trainer whose launcher ended as `how` says.

        The log since the last answer tells which rank it was, and why.
        """
        if self._hung:
            return PoolLost(
                f"the trainer is gone: {self._hung}", hint=f"Its log has the stacks of all ranks. {_HINT}"
            )
        if how.startswith(LOST):
            return PoolLost(f"the trainer is gone: it {how}", hint=_HINT)
        lines = self._child.output.tail(_LOG_LINES, since=self._fine).splitlines()
        return PoolLost(f"the trainer is gone: {ending(lines, how)}", hint=_HINT)


def ending(lines: Sequence[str], how: str) -> str:
    """Return which ranks ended a trainer, and why, by the lines of its log.

    A rank that is killed or fails takes the others with it, and any of them may be gone first. So a killed
    rank comes before one that exited, and of those that exited, the one that failed first.

    Args:
        how: How the launcher ended, for a log that names no rank.
    """
    reports = [(number, match) for number, line in enumerate(lines) if (match := _REPORT.match(line))]
    failures = [(number, match) for number, match in reports if match["how"] == FAILED]
    ends = [match for _, match in reports if match["how"] != FAILED]
    killed = [match for match in ends if match["how"].startswith(launch.KILLED)]
    trace = [line for line in lines if not _REPORT.match(line)]
    if killed:
        ends = killed
    elif failures:
        number, failure = failures[0]
        ends = [match for match in ends if match["rank"] == failure["rank"]] or [failure]
        trace = list(itertools.takewhile(lambda line: not _REPORT.match(line), lines[number + 1 :]))
    ranks = [
        f"{match['rank']} {match['how']}" + (f" on {match['node']}" if match["node"] else "")
        for match in ends
    ]
    why = "; " + cause("\n".join(trace)) if trace else ""
    return (", ".join(ranks) or f"it {how}") + why
