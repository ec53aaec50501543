"""One server: started, watched and started again by lorad, or the user's own.

starting -> up <-> asleep         what it says to requests: up, and nothing else
up, asleep -> down -> starting    it died, or was lost; `RemoteEngine` brings it back
starting -> failed                it serves something else than was attested, or dies again and again
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

from lorad.children.host import Host, Process
from lorad.children.process import cause
from lorad.engines.remote.copies import PLACE
from lorad.engines.remote.dialect import Abilities, Dialect, ServerSettings
from lorad.engines.remote.http import Address, Http, ServerGone, ServerRefused, ServerSilent
from lorad.errors import LoradError, PoolLost

log = logging.getLogger(__name__)

_START_SECONDS = 900.0  # weights, kernels and graphs of a large model
_TELL_SECONDS = 15.0  # between two lines that say that a server is still starting
_POLL_SECONDS = 0.25
LOOK_SECONDS = 10.0  # between two looks at a server
SILENT_SECONDS = 120.0  # without an answer of any kind, then not even to whether it lives: it hangs
ANSWER_SECONDS = 20.0
LOAD_SECONDS = 120.0
_SUSPECT_SECONDS = 10.0  # for the end of a process to be noticed, with all that it leaves behind
_QUIET_SECONDS = 30.0  # for a server to notice that its last request is over
_LOG_LINES = 400
T = TypeVar("T")
_State = Literal["starting", "up", "asleep", "down", "failed", "closed"]


class Server:
    """One server of a fleet.

    launch: makes the process of its next life; None for a server that the user runs.
    changed: called when `state` has changed.
    host: the node that the server is on; None for this machine.
    """

    def __init__(
        self,
        index: int,
        dialect: Dialect,
        settings: ServerSettings,
        address: Address,
        launch: Callable[[Host | None], Process] | None,
        changed: Callable[[], None],
        host: Host | None = None,
    ) -> None:
        self.index = index
        self.dialect = dialect
        self.settings = settings
        self.host = host
        self.process: Process | None = None
        self._launch = launch
        self.http = Http(address)
        self.state: _State = "starting"
        self.error: LoradError | None = None
        self.abilities: Abilities | None = None
        self.names: dict[str, Path] = {}  # what it has been asked to hold
        self.in_flight = 0
        self.life = 0
        self.heard = time.monotonic()
        self._changed = changed
        self._turns = asyncio.Semaphore(2 * settings.max_running)
        self._loads = asyncio.Lock()
        self._lost = asyncio.Event()

    def __str__(self) -> str:
        place = self.http.address if self.host is None else self.host.name
        return f"{self.dialect.kind.name} server {self.index} ({place})"

    def become(self, state: _State, error: LoradError | None = None) -> None:
        self.state = state
        self.error = error
        self._changed()

    async def start(self) -> None:
        """Start the server, and wait until it takes requests. Raises PoolLost with the end of its log."""
        self.names = {}
        self.heard = time.monotonic()
        self.life += 1
        await self.http.reset()
        self._lost.clear()
        self.become("starting")
        started = logged = time.monotonic()
        if self._launch is not None:
            self.process = self._launch(self.host)
            await self.process.start()
        while True:
            with contextlib.suppress(ServerGone, ServerSilent, ServerRefused):
                if await self.within(self.dialect.is_ready(self.http), ANSWER_SECONDS):
                    break
            if self.process is not None and not self.process.is_alive:
                raise self.broken(f"it {await self.process.ended()} while it started")
            if time.monotonic() - started > _START_SECONDS:
                raise self.broken(f"it was not ready after {_START_SECONDS:.0f} s")
            if time.monotonic() - logged > _TELL_SECONDS:
                logged = time.monotonic()
                log.info("%s: starting for %.0f s", self, logged - started)
            await asyncio.sleep(_POLL_SECONDS)
        self.abilities = await self.dialect.abilities(self.http)
        log.info("%s: ready after %.1f s", self, time.monotonic() - started)

    async def wait_until_gone(self) -> str:
        """Wait until the server died, hangs or is out of reach; returns what happened."""
        lost = asyncio.create_task(self._lost.wait())
        hangs = asyncio.create_task(self._hangs())
        ends = asyncio.create_task(self._emptied() if self.process is None else self.process.ended())
        try:
            await asyncio.wait({lost, hangs, ends}, return_when=asyncio.FIRST_COMPLETED)
            if ends.done():
                return f"it {ends.result()}"
            return hangs.result() if hangs.done() else "it does not answer any more"
        finally:
            for task in (lost, hangs, ends):
                task.cancel()

    def reads(self, directory: Path) -> Path:
        """Return the path by which it reads a version's directory of this machine."""
        return directory if self.host is None else self.host.directory / PLACE / directory.name

    async def load(self, name: str, directory: Path) -> None:
        """Load an adapter from a directory of this machine, one load after the other.

        Raises ServerRefused, ServerGone, or ServerSilent, after which it may still be loaded.
        """
        async with self._loads:
            await self.within(self.dialect.load(self.http, name, self.reads(directory)))
            self.names[name] = directory

    async def unload(self, name: str) -> None:
        """Unload an adapter; does nothing when the server does not hold it."""
        async with self._loads:
            self.names.pop(name, None)
            with contextlib.suppress(ServerRefused):
                await self.within(self.dialect.unload(self.http, name))

    async def forget(self, name: str, patience: float = 600.0) -> None:
        """Unload what a load that was given up may load yet: it may end long after its call."""
        end = time.monotonic() + patience
        while time.monotonic() < end and self.state in ("up", "asleep"):
            with contextlib.suppress(ServerGone, ServerSilent, ServerRefused):
                if name in await self.within(self.dialect.loaded(self.http)):
                    await self.unload(name)
                    return
            await asyncio.sleep(1.0)

    async def holds(self) -> dict[str, str]:
        return await self.within(self.dialect.loaded(self.http), ANSWER_SECONDS)

    async def judge(self, refused: ServerRefused, name: str | None) -> ServerRefused | ServerGone:
        """Decide what a refusal means: ServerGone where the worker is dead, or another than before."""
        try:
            dead = refused.code >= 500 and not await self.within(
                self.dialect.is_alive(self.http), ANSWER_SECONDS
            )
            if not dead and (name not in self.names or name in await self.holds()):
                return refused
        except (ServerGone, ServerSilent, ServerRefused):
            pass
        self.lose()
        return ServerGone(f"{self} is not what it was: {refused.text}")

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Count one request inside the block: while there are some, the server's silence is noticed."""
        if not self.in_flight:
            self.heard = time.monotonic()
        self.in_flight += 1
        try:
            yield
            self.heard = time.monotonic()
        finally:
            self.in_flight -= 1

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait while too many requests are under way, then enter one. Raises ServerGone unless it serves."""
        with self.working():
            async with self._turns:
                if self.state != "up":
                    raise ServerGone(f"{self} is {self.state}")
                yield

    def lose(self) -> None:
        """Give the server up: it is unusable, and `wait_until_gone` returns."""
        self._lost.set()

    async def confirm_gone(self) -> None:
        """Return when a server whose connection broke is known to be gone, or else after a while."""
        if self._launch is None and self.state == "up":
            self._lost.set()
        end = time.monotonic() + _SUSPECT_SECONDS
        while self.state == "up" and time.monotonic() < end:  # noqa: ASYNC110 (of its process, or of `wait_until_gone`)
            await asyncio.sleep(0.02)

    async def wait_until_quiet(self) -> None:
        """Wait until the idle server empties its prefix cache: some servers die of a sleep before that."""
        end = time.monotonic() + _QUIET_SECONDS
        while time.monotonic() < end:
            if await self.within(self.dialect.flush(self.http), ANSWER_SECONDS):
                return
            await asyncio.sleep(0.05)
        raise PoolLost(f"{self} still works on requests that nobody made through lorad", hint="Is it shared?")

    async def sleep(self) -> None:
        await self.wait_until_quiet()
        await self.within(self.dialect.sleep(self.http))
        self.become("asleep")

    async def close(self) -> None:
        """End a process of lorad's, and unload from a server of the user's what was loaded."""
        if self._launch is None and self.state in ("up", "asleep"):
            with contextlib.suppress(LoradError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    for name in list(self.names):
                        await self.unload(name)
        self.become("closed")
        await self.http.close()
        await self.end()

    async def end(self) -> None:
        if self.process is not None:
            await self.process.stop()

    async def within(self, answer: Awaitable[T], seconds: float | None = None) -> T:
        """Return the server's answer, or raise ServerSilent when it does not come in time."""
        seconds = seconds or LOAD_SECONDS
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError as error:
            raise ServerSilent(f"{self} did not answer within {seconds:.0f} s") from error

    async def _hangs(self) -> str:
        """Wait until the server hangs; returns a description.

        Only complete silence counts: a long prompt or a paused server is slow, not dead. A server without
        work, or asleep, says nothing by itself: it is asked as often.
        """
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            silent = time.monotonic() - self.heard
            if silent < SILENT_SECONDS:
                continue
            try:
                if await self.within(self.dialect.is_alive(self.http), ANSWER_SECONDS):
                    self.heard = time.monotonic()
                    continue
            except (ServerGone, ServerSilent, ServerRefused):
                pass
            return f"it has said nothing for {silent:.0f} s and does not answer"

    async def _emptied(self) -> str:
        """Wait until a server of the user's has lost its adapters, as by a restart; returns a description."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self.state != "up":
                continue
            try:
                if missing := set(self.names) - set(await self.holds()):
                    return f"lacks {', '.join(sorted(missing))}"
            except ServerGone:
                return "does not answer any more"
            except (ServerSilent, ServerRefused):
                pass  # it is slow, and `_hangs` says when it is dead

    def broken(self, why: str) -> PoolLost:
        tail = self.process.output.tail(_LOG_LINES) if self.process is not None else ""
        name = self.dialect.kind.name
        hint = f"`lorad doctor --engine {name}` tries it alone and says what to install or change."
        if flags := self.settings.engine_args:
            hint = f"Does {name} take rollout.engine_args ({', '.join(flags)}) like that?"
        hint = f"`lorad logs RUN --of engine` has all that it said. {hint}"
        return PoolLost(
            f"{self} could not be started: {why}" + (f"; {cause(tail)}" if tail else ""), hint=hint
        )
