"""Samples from versions and bases through the pools that serve them, as the gateway does.

Nothing is kept on disk: after a restart the client hears that its request is gone, and sends it again.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from msgspec import Struct

from lorad.errors import Conflict, DaemonUnreachable, EngineGone, LoradError, NotFound, PoolLost
from lorad.gateway.errors import ApiError
from lorad.gateway.own.bases import AnsweringPool, Bases, Peers, next_item
from lorad.gateway.own.resolve import Resolver
from lorad.protocol.batch import Chunk, Chunks, Prompt, Ranked, Sampling
from lorad.protocol.calls import Generate, Rank
from lorad.protocol.served import Served
from lorad.tinker.door.errors import BadRequest, HttpError
from lorad.tinker.door.runs import BASE, Runs
from lorad.tinker.door.wire import Sample, Top, write_samples

log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.05  # seconds between the first two tries
_LONGEST_PAUSE = 5.0  # seconds between two tries
_UNKNOWN_SECONDS = 20.0  # for the daemon to read in the run's journal that there is a version
_AWAY_SECONDS = 3600.0  # for a device to be free, a pool to start, the daemon to be there
_KEPT = 900.0  # seconds for which a result that nobody fetched is kept
CLONE = 10**9  # requests of the n-th copy of a sampler begin at n times that number
_POOL_SECONDS = 900.0  # for a pool to say anything more
_MOST = 4096  # requests under way
_MOST_OF_ONE = 1024  # requests under way of one owner
_ALWAYS = 64  # requests that one owner may have, however many others have
_MOST_BYTES = 1 << 30  # of results that are kept for one owner


class Wish(Struct, frozen=True):
    """One checked request for samples.

    Attributes:
        tokens: The prompt, int32 [P].
        seeds: A seed for each sample, uint64.
        last: How many of the prompt's last tokens get log-probabilities; 0 is none.
        top: How many of the most likely tokens are listed in each of these places.
    """

    tokens: np.ndarray
    seeds: np.ndarray
    sampling: Sampling
    last: int = 0
    top: int = 0


@dataclass(eq=False)
class _Sampled:
    """A request for samples.

    Attributes:
        body: The answer, once it has come.
        error: What to say instead of an answer: the words, and whose mistake it is.
        reason: Why it waits.
        ended: When it ended, by time.monotonic().
    """

    owner: str
    digest: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    body: bytes = b""
    error: tuple[str, str] | None = None
    reason: str = ""
    ended: float = 0.0
    is_fetched: bool = False
    task: asyncio.Task[None] | None = None

    async def wait(self, seconds: float) -> bool:
        """Wait so long for the end; return whether it came."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.done.wait(), seconds)
        self.is_fetched = self.done.is_set()
        return self.is_fetched


class SamplingPools:
    """Finds the pool of a version, has the daemon load the version there, and asks it."""

    def __init__(self, resolver: Resolver, runs: Runs) -> None:
        self.resolver = resolver
        self.bases = Bases()
        self.peers = Peers()
        self._runs = runs
        self._served_bases: dict[str, asyncio.Task[Served]] = {}  # by their directories

    async def answer(self, name: str, wish: Wish, waits: Callable[[str], None]) -> bytes:
        """Sample from `run@number`, or from the base in a directory.

        Waits for devices, pools and the daemon. A version may be unloaded for another one between the
        daemon's answer and the call, so that an unknown version is tried again, too.

        Args:
            waits: Takes the reason, in words, whenever the request has to wait.

        Raises LoradError, ApiError, BadRequest.
        """
        began = time.monotonic()
        pause = _FIRST_PAUSE
        served = None
        while True:
            try:
                if "@" not in name:
                    starting = self._served_bases.get(name)
                    if starting is not None and starting.done():
                        # none came to be, or the one that served it is gone
                        is_over = starting.exception() is not None or starting.result() == served
                        starting = None if is_over else starting
                    if starting is None:
                        starting = asyncio.create_task(self._runs.bring_up_base(name))
                        self._served_bases[name] = starting
                    served = await asyncio.shield(starting)
                elif served is None:
                    served = await self.resolver.find(name)
                else:
                    served = await self.resolver.find_another(name, served)
                return await self._answer(served, wish)
            except (LoradError, ApiError) as error:
                patience = 0.0
                if isinstance(error, NotFound) or (isinstance(error, ApiError) and error.status == 404):
                    patience = _UNKNOWN_SECONDS
                elif isinstance(error, PoolLost | EngineGone | DaemonUnreachable | Conflict):
                    patience = _AWAY_SECONDS
                if time.monotonic() - began > patience:
                    raise
                waits(error.message)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def close(self) -> None:
        await self.peers.close()
        self.resolver.close()

    async def _answer(self, served: Served, wish: Wish) -> bytes:
        if served.socket is None:
            raise PoolLost(f"no pool serves {served.name} now")
        peer = await self.peers.get(served.socket)
        if wish.last and not peer.info.ranks:
            raise BadRequest(f"the engine {peer.info.engine} gives no log-probabilities of prompts")
        most = peer.info.max_tokens
        if most and wish.tokens.size + wish.sampling.max_new_tokens > most:
            raise BadRequest(
                f"a prompt of {wish.tokens.size} tokens and {wish.sampling.max_new_tokens} new ones: the "
                f"engine takes {most} in all"
            )
        version = BASE if served.run == BASE else served.name
        samples, ranked = await asyncio.gather(_generated(peer, version, wish), _ranked(peer, version, wish))
        return write_samples(samples, *ranked)


async def _generated(peer: AnsweringPool, version: str, wish: Wish) -> list[Sample]:
    """Sample. Raises PoolLost, also when the pool says nothing for too long."""
    prompts = [Prompt("0", wish.tokens, wish.seeds)]
    parts: list[list[Chunk]] = [[] for _ in wish.seeds]
    items = peer.connection.stream("serve", Generate(version, prompts, wish.sampling))
    async with contextlib.aclosing(items):
        while isinstance(item := await next_item(items, _POOL_SECONDS), Chunks):
            if item.version != version:
                raise PoolLost(f"the pool answered with {item.version}, not {version}")
            for chunk in item.split(prompts):
                if chunk.finish == "abort":
                    raise PoolLost("the pool ended the request early")
                parts[chunk.index].append(chunk)
    return [
        Sample(
            np.concatenate([chunk.tokens for chunk in chunks]),
            np.concatenate([chunk.logprobs for chunk in chunks]),
            chunks[-1].finish == "stop",
        )
        for chunks in parts
    ]


async def _ranked(peer: AnsweringPool, version: str, wish: Wish) -> tuple[np.ndarray | None, Top | None]:
    """Return the prompt's log-probabilities, float32 [P], and the most likely tokens in each place.

    Log-probabilities that nobody asked for, and that of the first token, are NaN.
    """
    if not wish.last:
        return None, None
    size = wish.tokens.size
    start = max(size - wish.last, 1)
    logprobs = np.full(size, np.nan, np.float32)
    top_tokens = np.zeros((size, wish.top), np.int32)
    top_logprobs = np.full((size, wish.top), np.nan, np.float32)
    if start < size:
        ranked: Ranked = await peer.connection.call("rank", Rank(version, [wish.tokens], [start], wish.top))
        logprobs[start:] = ranked.logprobs
        top_tokens[start:] = ranked.top_tokens
        top_logprobs[start:] = ranked.top_logprobs
    return logprobs, (top_tokens, top_logprobs) if wish.top else None


@dataclass
class _Ended:
    """The requests of a sampler that ended, in that order, until their client has heard of them."""

    dropped: int = 0
    requests: list[tuple[str, int]] = field(default_factory=list)  # id, bytes of the answer
    has_more: asyncio.Event = field(default_factory=asyncio.Event)

    def after(self, cursor: int) -> list[tuple[str, int]]:
        """Return the requests behind a cursor; an earlier door's cursor is behind none."""
        if not self.dropped <= cursor <= self.dropped + len(self.requests):
            return self.requests
        del self.requests[: cursor - self.dropped]
        self.dropped = cursor
        return self.requests


class SampleRequests:
    """Has all requests for samples, by their ids."""

    def __init__(self, pools: SamplingPools) -> None:
        self._pools = pools
        self._requests: dict[str, _Sampled] = {}
        self._ended: dict[tuple[str, int], _Ended] = {}  # by sampler, and copy of it
        self._under_way: Counter[str] = Counter()  # by owner
        self._result_bytes: Counter[str] = Counter()  # bytes of results, by owner

    def refuse_many(self, owner: str) -> None:
        """Raise HttpError 429 when an owner has too many requests under way, or too many bytes to fetch.

        An owner with few requests is never refused: others cannot have all the places.
        """
        if self._result_bytes[owner] > _MOST_BYTES:
            for id, request in list(self._requests.items()):
                if request.owner == owner and request.is_fetched:
                    self._drop(id)
        if (size := self._result_bytes[owner]) > _MOST_BYTES:
            raise HttpError(429, f"{size} bytes of your samples wait to be fetched; fetch some")
        own = self._under_way[owner]
        total = self._under_way.total()
        if own >= _MOST_OF_ONE or (total >= _MOST and own >= _ALWAYS):
            raise HttpError(
                429,
                f"{own} of your requests for samples and {total} in all are under way; more than "
                f"{_MOST_OF_ONE} and {_MOST} are not taken at once. Ask again when some have ended",
            )

    def find(self, id: str) -> _Sampled | None:
        return self._requests.get(id)

    def start(self, id: str, digest: str, owner: str, name: str, wish: Wish) -> None:
        """Begin a request for samples of a version, as run@number, or of the base in a directory."""
        request = self._requests[id] = _Sampled(owner, digest)
        self._under_way[owner] += 1
        request.task = asyncio.create_task(self._run(id, request, name, wish))
        # also of a task that is cancelled before it begins
        request.task.add_done_callback(partial(self._end, id, request))

    async def _run(self, id: str, request: _Sampled, name: str, wish: Wish) -> None:
        def waits(reason: str) -> None:
            request.reason = reason

        try:
            request.body = await self._pools.answer(name, wish, waits)
        except BadRequest as error:
            request.error = str(error), "user"
        except (LoradError, ApiError) as error:
            request.error = error.message, "server"
            log.warning("%s: %s", id, error.message)
        except Exception as error:
            words = f"this is a defect of lorad; the log of its door has the details: {error}"
            request.error = words, "server"
            log.exception("%s", id)

    def _end(self, id: str, request: _Sampled, task: asyncio.Task[None]) -> None:
        """Note that a request ended, so that its client may fetch it."""
        if task.cancelled():
            request.error = "it was cancelled", "user"
        self._under_way[request.owner] -= 1
        request.ended = time.monotonic()
        if self._requests.get(id) is request:
            self._result_bytes[request.owner] += len(request.body)
        request.done.set()
        sampler, _, number = id.rpartition(":")
        ended = self._ended.setdefault((sampler, int(number) // CLONE), _Ended())
        ended.requests.append((id, len(request.body)))
        ended.has_more.set()

    def cancel(self, owner: str, id: str) -> None:
        request = self._requests.get(id)
        if request is not None and request.owner == owner and request.task is not None:
            request.task.cancel()

    def forget(self, ids: list[str], owner: str) -> None:
        """Drop results that their client has received."""
        for id in ids:
            if (request := self._requests.get(id)) is not None and request.owner == owner:
                self._drop(id)

    def forget_old(self) -> None:
        """Drop results that nobody fetched."""
        now = time.monotonic()
        for id, request in list(self._requests.items()):
            if request.done.is_set() and now - request.ended > _KEPT:
                self._drop(id)
        for ended in self._ended.values():
            # some clients ask for each request by itself: drop the oldest, up to the first that is remembered
            numbered = enumerate(ended.requests)
            first = next((n for n, (id, _) in numbered if id in self._requests), len(ended.requests))
            del ended.requests[:first]
            ended.dropped += first

    def _drop(self, id: str) -> None:
        request = self._requests.pop(id)
        if request.done.is_set():  # otherwise its bytes are not counted yet, and will not be
            self._result_bytes[request.owner] -= len(request.body)

    async def wait_for_ended(
        self, sampler: str, clone: int, cursor: int, seconds: float
    ) -> tuple[list[tuple[str, int]], int]:
        """Wait so long for requests of a sampler to end.

        Returns the ended requests behind the cursor, as (id, bytes), and the next cursor.
        """
        ended = self._ended.setdefault((sampler, clone), _Ended())
        if not ended.after(cursor) and seconds:
            ended.has_more.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.has_more.wait(), seconds)
        return list(ended.requests), ended.dropped + len(ended.requests)

    async def close(self) -> None:
        tasks = [request.task for request in self._requests.values() if request.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pools.close()
