"""Calls on servers: samples, each a task whose pieces come together in a queue, and log-probabilities."""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar, cast

import numpy as np

from lorad.engines.base import Scored, routes_of
from lorad.engines.remote.dialect import SamplePiece
from lorad.engines.remote.http import NotFinite, ServerGone, ServerRefused, ServerSilent
from lorad.engines.remote.server import ANSWER_SECONDS, Server
from lorad.errors import LoradError, PoolLost
from lorad.protocol.batch import Batch, Chunk, Prompt, Ranked, Sampling
from lorad.routes import RouteShape

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
TRIES = 4  # for one sample: each time on a server that serves, from its first token
_END = "."  # of every name of a sample: some servers abort whatever begins with a name
_Picker = Callable[[np.ndarray], Awaitable[Server]]
"""Chooses the server for a prompt; waits while none serves, raises when none ever will."""
_SCORE_SECONDS = 120.0  # for one prompt and completion
_SCORING = 16  # under way at once on one server
_calls = itertools.count()


class Call:
    """One `generate` call, spread over the servers.

    version: the version's name for the caller.
    server_name: the version's name for the servers; None is the base.
    shape: the shape of the routes, where the sampling asks for them.
    may_be_a_neighbours: takes servers whose scores were not finite, and returns whether another version may
        be the cause.
    """

    def __init__(
        self,
        request: str,
        version: str,
        server_name: str | None,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        may_be_a_neighbours: Callable[[Sequence[Server]], bool],
        shape: RouteShape | None = None,
    ) -> None:
        self.request = request
        self.version = version
        self.server_name = server_name
        self._may_be_a_neighbours = may_be_a_neighbours
        self._shape = shape
        self.prompts = prompts
        self.sampling = sampling
        self.aborted = False
        self._queue: asyncio.Queue[Chunk | BaseException] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: dict[str, Server] = {}
        self._waiting: set[asyncio.Task[None]] = set()  # for a server, or for their turn

    @property
    def running(self) -> int:
        """Count the samples that a server works on."""
        return len(self._under_way)

    @property
    def waiting(self) -> int:
        """Count the samples that no server has yet."""
        return sum(not task.done() for task in self._waiting)

    async def chunks(self, pick: _Picker, count: Callable[[int], None]) -> AsyncGenerator[Chunk, None]:
        """Yield chunks until every sample has ended, and `count` tokens. Raises what a sample raised."""
        left = sum(len(prompt.seeds) for prompt in self.prompts)
        for place, prompt in enumerate(self.prompts):
            for index in range(len(prompt.seeds)):
                task = asyncio.create_task(self._to_queue(pick, place, index))
                task.add_done_callback(partial(self._never_began, prompt, index))
                self._tasks.add(task)
        self._waiting = set(self._tasks)
        try:
            while left:
                chunk = await self._queue.get()
                if isinstance(chunk, BaseException):
                    raise chunk
                left -= chunk.finish is not None
                count(chunk.tokens.size)
                yield chunk
        finally:
            if unfinished := [task for task in self._tasks if not task.done()]:
                await self.abort()
                for task in unfinished:
                    task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def abort(self) -> None:
        """End samples under way with what they have, and the others with nothing."""
        self.aborted = True
        for task in self._waiting:
            task.cancel()
        by_server: dict[Server, list[str]] = {}
        for request, server in self._under_way.items():
            by_server.setdefault(server, []).append(request)
        aborts = (
            server.within(server.dialect.abort(server.http, requests), ANSWER_SECONDS)
            for server, requests in by_server.items()
        )
        outcomes = await asyncio.gather(*aborts, return_exceptions=True)
        for server, outcome in zip(by_server, outcomes, strict=True):
            if isinstance(outcome, ServerGone | ServerSilent | ServerRefused):
                log.warning("%s did not take an abort: %s", server, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    def _never_began(self, prompt: Prompt, index: int, task: asyncio.Task[None]) -> None:
        """Report a sample as aborted whose task was cancelled before `_to_queue` could report it."""
        if task.cancelled():
            self._queue.put_nowait(self._chunk(prompt, index, SamplePiece([], [], "abort")))

    async def _to_queue(self, pick: _Picker, place: int, index: int) -> None:
        try:
            async with aclosing(self._sample(pick, place, index)) as pieces:
                async for piece in pieces:
                    self._queue.put_nowait(self._chunk(self.prompts[place], index, piece))
        except (Exception, asyncio.CancelledError) as error:
            end = self._chunk(self.prompts[place], index, SamplePiece([], [], "abort"))
            self._queue.put_nowait(end if self.aborted else error)

    async def _sample(self, pick: _Picker, place: int, index: int) -> AsyncGenerator[SamplePiece, None]:
        """Yield the pieces of one sample, which begins again elsewhere while nothing of it was passed on."""
        prompt = self.prompts[place]
        error: LoradError = PoolLost("no server took it")
        for again in range(TRIES):
            begun = False
            server = None
            self._waiting.add(cast("asyncio.Task[None]", asyncio.current_task()))
            if self.aborted:
                raise asyncio.CancelledError
            request = f"{self.request}/{place}/{index}/{again}{_END}"
            try:
                server = await pick(prompt.tokens)
                async with server.turn(), aclosing(self._asked(server, request, prompt, index)) as pieces:
                    async for piece in pieces:
                        begun = True
                        yield piece
                        if piece.finish is not None:
                            return
                error = PoolLost(f"{server} ended a sample without a reason")
            except (ServerGone, ServerRefused, NotFinite) as raised:
                error = await self._excused(raised, server)
            if begun:
                break
            if server is not None:
                await server.confirm_gone()
        raise PoolLost(
            f"a sample of {self.version} was lost: {error}",
            hint="The log of the engine says more (`lorad logs RUN --of engine`); then resume the run.",
        ) from error

    async def _excused(self, error: LoradError, server: Server | None) -> LoradError:
        """Return an error that is the server's fault, so that another may be tried; raise any other."""
        if server is None:
            raise error
        if isinstance(error, NotFinite):
            server.lose()
            if not self._may_be_a_neighbours([server]):
                raise error
        if isinstance(error, ServerRefused):
            error = await server.judge(error, self.server_name)
        if isinstance(error, ServerRefused):
            raise error
        return error

    async def _asked(
        self, server: Server, request: str, prompt: Prompt, index: int
    ) -> AsyncGenerator[SamplePiece, None]:
        """Yield one sample's pieces as the server sends them; an abort that nobody asked for is an error."""
        self._waiting.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        seed = int(prompt.seeds[index])
        pieces = server.dialect.sample(
            server.http, request, self.server_name, prompt.tokens.tolist(), seed, self.sampling
        )
        self._under_way[request] = server
        try:
            async with aclosing(cast("AsyncGenerator[SamplePiece, None]", pieces)):
                async for piece in pieces:
                    server.heard = time.monotonic()
                    finite = [value for value in piece.logprobs if math.isfinite(value)]
                    if not len(piece.tokens) == len(piece.logprobs) == len(finite):
                        raise NotFinite(f"{server} answered without a finite log-probability for every token")
                    if piece.finish == "abort" and not self.aborted:
                        raise ServerGone(f"{server} gave up a sample")
                    yield piece
        finally:
            del self._under_way[request]

    def _chunk(self, prompt: Prompt, index: int, piece: SamplePiece) -> Chunk:
        routes = None
        if piece.routes is not None and self._shape is not None:
            routes = all_routes(piece.routes, self._shape)
            if index:  # the prompt's routes come with its first sample alone
                routes = routes[prompt.tokens.size :]
        return Chunk(
            prompt=prompt.id,
            index=index,
            version=self.version,
            tokens=np.array(piece.tokens, np.int32),
            logprobs=np.array(piece.logprobs, np.float32),
            finish=piece.finish,
            routes=routes,
        )


def all_routes(flat: np.ndarray, shape: RouteShape) -> np.ndarray:
    """Return the routes of all tokens; a server leaves out the last. Raises LoradError for foreign ones."""
    if flat.size % (shape.layers * shape.per_token) or (
        flat.size and not 0 <= flat.min() <= flat.max() < shape.experts
    ):
        raise LoradError(f"the server said {flat.size} numbers as routes, which are not of {shape}")
    routes = flat.reshape(-1, shape.layers, shape.per_token).astype(shape.dtype)
    return np.concatenate([routes, shape.unknown(1)])


async def score_batch(
    server: Server, name: str | None, batch: Batch, shape: RouteShape | None = None
) -> Scored:
    """Score a batch on one server, whatever its state.

    name: the version's name there; None for the base.
    shape: the shape of the routes, where the caller asks for them.

    Raises ServerGone, NotFinite, ServerRefused, ServerSilent; no request is left running.
    """
    batch.check()
    pairs = [(prompt, completion) for prompt, group in batch.groups() for completion in group]

    async def score_pair(
        request: str, pair: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        prompt, completion = (part.tolist() for part in pair)
        if shape is None:
            return await server.dialect.score(server.http, request, name, prompt, completion), None
        scores, routes = await server.dialect.routed_score(server.http, request, name, prompt, completion)
        return scores, all_routes(routes, shape)

    scores = await _ask_about_each(server, name, score_pair, pairs)
    logprobs = np.concatenate([part for part, _ in scores]).astype(np.float32)
    if not np.isfinite(logprobs).all():
        raise NotFinite(f"{server} scored without a finite log-probability for every token")
    return Scored(logprobs, routes_of(batch, [routes for _, routes in scores if routes is not None]))


async def rank_texts(
    server: Server, name: str | None, texts: Sequence[np.ndarray], starts: Sequence[int], most: int
) -> Ranked:
    """Rank the tokens of texts on one server, see `Engine.ranked`. Raises as `score_batch`."""

    def rank_text(request: str, text: tuple[np.ndarray, int]) -> Awaitable[Ranked]:
        return server.dialect.ranked(server.http, request, name, text[0].tolist(), text[1], most)

    pairs = list(zip(texts, starts, strict=True))
    return Ranked.joined(await _ask_about_each(server, name, rank_text, pairs))


async def _ask_about_each(
    server: Server, name: str | None, ask: Callable[[str, T], Awaitable[R]], things: Sequence[T]
) -> list[R]:
    """Ask a server about each item, some at once; `ask` takes a name for the request, and an item."""
    limit = asyncio.Semaphore(_SCORING)
    call = next(_calls)

    async def ask_one(number: int, thing: T) -> R:
        async with limit:
            with server.working():
                return await server.within(ask(f"score/{call}/{number}.", thing), _SCORE_SECONDS)

    tasks = [asyncio.create_task(ask_one(number, thing)) for number, thing in enumerate(things)]
    try:
        return await asyncio.gather(*tasks)
    except ServerRefused as refused:
        raise await server.judge(refused, name) from refused
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def score_on_each(
    servers: Sequence[Server], name: str | None, batch: Batch, shape: RouteShape | None = None
) -> list[Scored]:
    """Score a batch on each server; those whose scores are not finite are given up.

    Raises ServerGone when some died, once it is known which; other errors come first.
    """
    outcomes = await asyncio.gather(
        *(score_batch(server, name, batch, shape) for server in servers), return_exceptions=True
    )
    of = list(zip(servers, outcomes, strict=True))
    for server in [server for server, outcome in of if isinstance(outcome, NotFinite)]:
        server.lose()
    gone = [server for server, outcome in of if isinstance(outcome, ServerGone | NotFinite)]
    await asyncio.gather(*(server.confirm_gone() for server in gone))
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in sorted(failed, key=lambda error: isinstance(error, ServerGone)):
        raise error
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
