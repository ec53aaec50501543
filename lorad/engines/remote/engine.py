"""A rollout engine of one or several servers: SGLang or vLLM behind the engine protocol.

One table lists what all servers hold; a version is loaded when every serving server has it. A server that
dies is started again, loaded with what it has to hold, compared with what was attested, and only then served
from. Meanwhile the others continue; without any, calls wait.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import ClassVar, Self, TypeVar

import numpy as np

from lorad.children.host import Host
from lorad.engines import base
from lorad.engines.remote.call import TRIES, Call, rank_texts, score_batch, score_on_each
from lorad.engines.remote.dialect import Dialect, Metrics, ServerSettings
from lorad.engines.remote.fleet import Fleet
from lorad.engines.remote.holdings import Holdings, Shapes
from lorad.engines.remote.http import NotFinite, ServerGone
from lorad.engines.remote.server import ANSWER_SECONDS, Server
from lorad.engines.remote.starts import Directories
from lorad.engines.remote.transport import ServerTransport
from lorad.errors import Conflict, EngineGone, LoradError, SpecError
from lorad.models.facts import read_facts
from lorad.protocol.batch import Batch, Chunk, Prompt, Ranked, Sampling
from lorad.protocol.pool_setup import ServerSetup
from lorad.routes import RouteShape

N = TypeVar("N", int, float)
_RATE_SECONDS = 5.0
_HITS_SECONDS = 60.0
_FRESH_SECONDS = 1.0  # what servers said is repeated for so long
_ANSWER_SECONDS = 1.0
_settled: ContextVar[bool] = ContextVar("settled", default=False)
_BACK = "It restarts automatically; the log of the engine says why it died (`lorad logs RUN --of engine`)."


class _Meter:
    """All methods belong to the engine's asyncio loop."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[float, int]] = deque()
        self._prompts: deque[tuple[float, int, int]] = deque()  # time, prompt tokens and cached ones so far
        self._metrics: list[Metrics] = []
        self._asked_at = float("-inf")

    def count(self, tokens: int) -> None:
        self._tokens.append((time.monotonic(), tokens))
        while self._tokens and self._tokens[0][0] < time.monotonic() - _RATE_SECONDS:
            self._tokens.popleft()

    async def health(self, fleet: Fleet, calls: Sequence[Call]) -> base.EngineHealth:
        now = time.monotonic()
        if now - self._asked_at > _FRESH_SECONDS:
            questions = (
                server.within(server.dialect.metrics(server.http), _ANSWER_SECONDS)
                for server in fleet.serving
            )
            answers = await asyncio.gather(*questions, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException) and not isinstance(answer, LoradError):
                    raise answer
            self._metrics = [metrics for metrics in answers if isinstance(metrics, Metrics)]
            self._asked_at = now = time.monotonic()
            counted = [m for m in self._metrics if None not in (m.prompt_tokens, m.cached_tokens)]
            if counted:
                total = sum(m.prompt_tokens or 0 for m in counted)
                if self._prompts and total < self._prompts[-1][1]:
                    self._prompts.clear()  # a server began again
                self._prompts.append((now, total, sum(m.cached_tokens or 0 for m in counted)))
            while len(self._prompts) > 2 and self._prompts[0][0] < now - _HITS_SECONDS:
                self._prompts.popleft()
        hits = None
        if self._prompts and (tokens := self._prompts[-1][1] - self._prompts[0][1]):
            hits = (self._prompts[-1][2] - self._prompts[0][2]) / tokens
        trouble = [
            f"server {server.index} is {server.state}"
            + (f": {server.error.message.splitlines()[0]}" if server.error else "")
            for server in fleet.servers
            if server.state not in ("up", "asleep")
        ]
        up = len(fleet.servers) - len(trouble)
        return base.EngineHealth(
            alive=not fleet.is_over,
            asleep=fleet.asleep,
            running=sum(call.running for call in calls),
            waiting=sum(call.waiting for call in calls),
            tokens_per_second=sum(count for at, count in self._tokens if at >= now - _RATE_SECONDS)
            / _RATE_SECONDS,
            slots_used=_most([metrics.slots_used for metrics in self._metrics]),
            slots=_most([metrics.slots for metrics in self._metrics]),
            prefix_hits=hits,
            cache_used=_most([metrics.cache_used for metrics in self._metrics]),
            detail="; ".join([f"{up} of {len(fleet.servers)} servers serve", *trouble]) if trouble else "",
        )


def _most(values: Sequence[N | None]) -> N | None:
    return max((value for value in values if value is not None), default=None)


class RemoteEngine(base.Engine):
    """Made by `open`."""

    dialect: ClassVar[type[Dialect]]

    @classmethod
    async def open(
        cls,
        setup: ServerSetup,
        settings: ServerSettings,
        shapes: Shapes,
        *,
        work: Path,
        logs: Path | None = None,
        hosts: Sequence[Host] = (),
    ) -> Self:
        """Start every server, or reach it, and wait until they serve.

        settings: see `settings_of`.
        shapes: (out, in) of every linear of the base.
        work: an existing directory, the same in each life of the pool, with what the next life has to clear
            away.
        logs: the directory of `engine-<n>.log`; None for `work`.
        hosts: the nodes that have all servers; none where they are on this machine.

        Raises SpecError, PoolLost with the end of a server's log.
        """
        fleet = Fleet(cls.dialect(), settings, setup, Directories(work, logs or work), hosts)
        transport = ServerTransport(work, str(settings.model), fleet.dialect.kind.called)
        holdings = Holdings(fleet, settings, shapes, transport)
        engine = cls(fleet, holdings, settings, read_facts(settings.model).vocab)
        try:
            await fleet.open(engine._restore)
        except BaseException:
            await engine.close()
            raise
        return engine

    def __init__(self, fleet: Fleet, holdings: Holdings, settings: ServerSettings, vocab_size: int) -> None:
        self._fleet = fleet
        self._holdings = holdings
        self._settings = settings
        self._vocab_size = vocab_size
        self._versions = holdings.versions
        self._calls: dict[str, Call] = {}
        self._joining = asyncio.Lock()  # which servers serve; taken before `holdings.changing`
        self._meter = _Meter()
        # by digest: the lives of servers in which it gave NaN
        self._not_finite: dict[str, set[tuple[int, int]]] = {}
        self._check: Callable[[base.Scorer], Awaitable[None]] | None = None

    def capabilities(self) -> base.EngineCapabilities:
        abilities = self._fleet.abilities
        return base.EngineCapabilities(
            dtype=self._settings.dtype,
            max_rank=self._settings.max_rank,
            max_versions=self._settings.max_versions,
            max_tokens=abilities.max_tokens,
            memory_source=True,
            sleep=abilities.sleep,
            bit_stable=False,
            ranks=True,
            formats=abilities.formats,
            routes=self._settings.routes,
        )

    def software(self) -> dict[str, str]:
        return {self.dialect.kind.name: self._fleet.abilities.version}

    def replace_node(self, lost: Host, host: Host) -> None:
        """Start the servers of a lost node on another; each serves once it scores as before."""
        self._fleet.replace(lost, host)

    def expect_nodes(self, seconds: float) -> None:
        """Wait so many seconds for a node in the place of the last lost one, before the engine is over."""
        self._fleet.patience = seconds

    def on_return(self, check: Callable[[base.Scorer], Awaitable[None]]) -> None:
        self._check = check

    async def load(self, name: str, source: base.AdapterSource) -> base.LoadedVersion:
        await self._serving_servers()
        return (await self._holdings.add(name, source)).describe()

    async def unload(self, name: str) -> None:
        await self._holdings.remove(name)

    async def loaded(self) -> Sequence[base.LoadedVersion]:
        if not self._fleet.asleep:
            await self._serving_servers()
        return [version.describe() for version in await self._holdings.list_reported()]

    async def generate(
        self, request: str, version: str, prompts: Sequence[Prompt], sampling: Sampling
    ) -> AsyncIterator[Chunk]:
        base.check_request(prompts, sampling, self._vocab_size, self._fleet.abilities.max_tokens)
        if wrong := self._fleet.dialect.check(sampling, self._settings):
            raise SpecError(f"{self.dialect.kind.name} cannot sample like this: {wrong}", hint="Change that.")
        if sampling.schema and not self._fleet.abilities.formats:
            raise SpecError(
                f"this {self.dialect.kind.name} follows no JSON schema", hint="Give it a grammar backend."
            )
        await self._fleet.takes_calls.wait()
        with self._versions.use(version) as loaded:
            suspect = partial(self._may_be_a_neighbours, loaded.digest)
            of = request, version, loaded.server_name, prompts, sampling, suspect, self._settings.routes
            call = self._calls[request] = Call(*of)
            try:
                async with contextlib.aclosing(call.chunks(self._fleet.pick, self._meter.count)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            finally:
                self._calls.pop(request, None)

    async def score(self, version: str, batch: Batch) -> np.ndarray:
        return (await self._scored(version, batch, everywhere=False))[0].logprobs

    async def scores(self, version: str, batch: Batch) -> Sequence[np.ndarray]:
        return [said.logprobs for said in await self._scored(version, batch, everywhere=True)]

    async def routed_scores(self, version: str, batch: Batch) -> Sequence[base.Scored]:
        return await self._scored(version, batch, everywhere=True, shape=self._settings.routes)

    async def ranked(
        self, version: str, texts: Sequence[np.ndarray], starts: Sequence[int], most: int
    ) -> Ranked:
        base.check_texts(texts, starts, self._vocab_size, self._fleet.abilities.max_tokens)
        await self._fleet.takes_calls.wait()
        with self._versions.use(version) as loaded:
            for _ in range(TRIES):
                server = (await self._serving_servers())[0]
                try:
                    return await rank_texts(server, loaded.server_name, texts, starts, most)
                except ServerGone as error:
                    gone = error
                    await server.confirm_gone()
            raise EngineGone(f"a text of {version} could not be ranked: {gone}", hint=_BACK) from gone

    async def _scored(
        self, version: str, batch: Batch, *, everywhere: bool, shape: RouteShape | None = None
    ) -> list[base.Scored]:
        """Score on one or all of the serving servers; when one dies meanwhile, on those that are left."""
        await self._fleet.takes_calls.wait()
        with self._versions.use(version) as loaded:
            for _ in range(TRIES):
                serving = await self._serving_servers()
                try:
                    asked = serving if everywhere else serving[:1]
                    return await score_on_each(asked, loaded.server_name, batch, shape)
                except ServerGone as error:
                    gone: LoradError = error
                except NotFinite as error:
                    if not self._may_be_a_neighbours(loaded.digest, serving):
                        return [base.Scored(np.full(batch.targets.size, np.nan, np.float32))]
                    gone = error
            raise EngineGone(f"{version} could not be scored: {gone}", hint=_BACK) from gone

    def _may_be_a_neighbours(self, digest: str, servers: Sequence[Server]) -> bool:
        """Return whether NaN may be what another version left in a server's memory.

        In a second life of the server, it is the version's own.
        """
        lives = self._not_finite.setdefault(digest, set())
        before = set(lives)
        lives.update((server.index, server.life) for server in servers)
        return before <= {(server.index, server.life) for server in servers}

    async def abort(self, request: str) -> None:
        if request in self._calls:
            await self._calls[request].abort()

    async def drain(self) -> None:
        await self._versions.drained()

    async def sleep(self) -> None:
        if not self._fleet.abilities.sleep:
            raise Conflict(
                f"{self.dialect.kind.name} {self._fleet.abilities.version} has no routes for sleep and wake",
                hint="use mode resident",
            )
        self._fleet.takes_calls.clear()
        try:
            await self.drain()
            async with self._joining, self._holdings.changing:
                await self._fleet.sleep()
        except BaseException:
            await self.wake()
            raise

    async def wake(self) -> None:
        try:
            async with self._joining:
                await self._fleet.wake(self._verify)
            await self._fleet.wait_for_servers()
        finally:
            self._fleet.takes_calls.set()
        await self._holdings.clear_up()

    async def health(self) -> base.EngineHealth:
        return await self._meter.health(self._fleet, list(self._calls.values()))

    def stop_waiting(self) -> None:
        self._fleet.stop_waiting()

    @contextlib.asynccontextmanager
    async def settled(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            while True:
                await self._fleet.wait_for_servers()
                await stack.enter_async_context(self._joining)
                if self._fleet.serving:
                    break
                # the last one died while the lock was waited for, and needs it to return
                await stack.aclose()
            stack.callback(_settled.reset, _settled.set(True))
            yield

    async def close(self) -> None:
        self.stop_waiting()
        self._fleet.takes_calls.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                await asyncio.gather(*(call.abort() for call in list(self._calls.values())))
        await self._fleet.close()
        await asyncio.to_thread(self._holdings.close)

    async def _serving_servers(self) -> list[Server]:
        """Return the serving servers; inside `settled`, raise EngineGone instead of waiting for one."""
        if _settled.get() and not self._fleet.serving:
            raise EngineGone("the last server that served died amid a publish", hint=_BACK)
        return await self._fleet.wait_for_servers()

    async def _restore(self, server: Server, *, first: bool) -> None:
        """Have a started server hold every version, and serve from it once it scores them as before."""
        async with self._joining:
            await self._holdings.fill(server)
            if self._fleet.asleep:  # waking compares it
                await server.sleep()
                return
            if not first:
                await self._verify(server)
            await self._holdings.fill(server, then=lambda: server.become("up"))

    async def _verify(self, server: Server) -> None:
        """Have the pool check what a server scores. Raises what the check raises."""
        if self._check is None:
            return

        async def scorer(version: str, batch: Batch) -> np.ndarray:
            with self._versions.use(version) as loaded:
                return (await score_batch(server, loaded.server_name, batch)).logprobs

        await self._check(scorer)
