"""What the engines have in common whose model is in the pool's own process.

The asyncio loop keeps the books; every tensor is touched on the pool's compute thread.
"""

import asyncio
import time
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from tokenizers import Tokenizer

from lorad.adapters.adapter import Adapter
from lorad.engines.base import (
    AdapterSource,
    Engine,
    EngineHealth,
    LoadedVersion,
    check_request,
    check_texts,
)
from lorad.engines.builtin.calls import Call, Decoder, HeldLora, Report
from lorad.engines.versions import Versions, receive
from lorad.errors import SpecError
from lorad.models.compute import Compute
from lorad.models.turns import caller
from lorad.protocol.batch import Batch, Chunk, Prompt, Ranked, Sampling

MAX_RANK = 512
FORWARD_TOKENS = 8192  # per micro-batch, padding included
_RATE_SECONDS = 5.0
Text = tuple[np.ndarray, int]
"""Tokens, and from which on they are scored."""
H = TypeVar("H", bound=HeldLora)
R = TypeVar("R")


class LocalEngine(Engine, Generic[H]):
    """Serves a base, and adapters on it, by batches that run on the compute thread, a quantum at a time.

    Args:
        called: The engine's name in messages.
        compute: The pool's.
        directory: Where the model is; its tokenizer finds stop strings.
        shapes: (out, in) of the base's linears.
        versions: The table of versions, with the base.
        vocab_size: The tokens that the base has scores for.
        max_tokens: The positions that it has.
        forward_tokens: What a forward that scores has at most, padding included, unless one text has more.
    """

    def __init__(
        self,
        called: str,
        compute: Compute,
        directory: Path,
        shapes: Mapping[str, tuple[int, int]],
        versions: Versions[H],
        vocab_size: int,
        max_tokens: int,
        forward_tokens: int = FORWARD_TOKENS,
    ) -> None:
        self._called = called
        self._compute = compute
        self._directory = directory
        self._shapes = shapes
        self._versions = versions
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._forward_tokens = forward_tokens
        self._tasks: dict[Any, asyncio.Task[None]] = {}  # by the batch that each of them drives
        self._calls: list[Call] = []
        self._rate: deque[tuple[float, int]] = deque()  # when tokens came, and how many
        self._decoder: Decoder | None = None
        self._closed = False

    @abstractmethod
    async def _placed(self, name: str, digest: str, adapter: Adapter) -> H:
        """Put an adapter on the device."""

    @abstractmethod
    async def _start(self, call: Call) -> None:
        """Put a call into a batch, and see that somebody drives it. Raises Conflict once it is closed."""

    @abstractmethod
    def _rank(self, most: int, texts: list[Text], version: H) -> Ranked:
        """Rank the texts of a micro-batch, see `ranked`; called on the compute thread."""

    @asynccontextmanager
    async def _room(self, call: Call) -> AsyncIterator[None]:
        """Wait until there is memory for a call, and hold it."""
        yield

    async def load(self, name: str, source: AdapterSource) -> LoadedVersion:
        self._versions.reserve(name)
        try:
            if source.adapter is not None and source.adapter.is_known:  # nothing to hash
                adapter = receive(source, self._shapes, MAX_RANK)
            else:
                adapter = await asyncio.to_thread(receive, source, self._shapes, MAX_RANK)
            version = await self._placed(name, source.digest, adapter)
        except BaseException:
            self._versions.release(name)
            raise
        self._versions.put(version)
        return version.describe()

    async def unload(self, name: str) -> None:
        await self._versions.remove(name)

    async def loaded(self) -> Sequence[LoadedVersion]:
        return [version.describe() for version in self._versions.table.values()]

    async def generate(
        self, request: str, version: str, prompts: Sequence[Prompt], sampling: Sampling
    ) -> AsyncIterator[Chunk]:
        check_request(prompts, sampling, self._vocab_size, self._max_tokens)
        if sampling.schema:
            raise SpecError(f"the {self._called} engine follows no JSON schema", hint="Use SGLang or vLLM.")
        if sampling.stop and self._decoder is None:
            path = self._directory / "tokenizer.json"
            if not path.is_file():
                why = f"{path} is missing, so stop strings cannot be found"
                raise SpecError(why, hint="use stop_token_ids")
            self._decoder = await asyncio.to_thread(Tokenizer.from_file, str(path))
        with self._versions.use(version) as user:
            call = Call(request, user, prompts, sampling, self._decoder, caller())
            self._calls.append(call)
            try:
                async with self._room(call):
                    await self._start(call)
                    while (chunks := await call.queue.get()) is not None:
                        if isinstance(chunks, Exception):
                            raise chunks
                        for chunk in chunks:
                            yield chunk
            finally:
                call.aborted = True
                call.groups.clear()  # each refers to the call: its version would wait for a collection
                self._calls.remove(call)

    def _tell(self, reports: Sequence[Report]) -> None:
        """Hand out what a quantum has made."""
        now = time.monotonic()
        for call, chunks, ended in reports:
            self._rate.append((now, call.more()))
            call.queue.put_nowait(chunks)
            if ended:
                call.queue.put_nowait(None)
        while self._rate and self._rate[0][0] < now - _RATE_SECONDS:
            self._rate.popleft()

    async def ranked(
        self, version: str, texts: Sequence[np.ndarray], starts: Sequence[int], most: int
    ) -> Ranked:
        check_texts(texts, starts, self._vocab_size, self._max_tokens)
        rank = partial(self._rank, min(most, self._vocab_size))
        return Ranked.joined(await self.forward_each(version, zip(texts, starts, strict=True), rank))

    async def forward_each(
        self, version: str, texts: Iterable[Text], forward: Callable[[list[Text], H], R]
    ) -> list[R]:
        """Return what a forward over each micro-batch of texts gives, in their order."""
        with self._versions.use(version) as user:
            parts = _micro_batches(texts, self._forward_tokens)
            return await self._compute.each(partial(forward, part, user) for part in parts)

    async def abort(self, request: str) -> None:
        for call in self._calls:
            if call.request == request:
                call.aborted = True

    async def drain(self) -> None:
        await self._versions.drained()

    async def wake(self) -> None:
        """Do nothing: this engine never sleeps."""

    async def health(self) -> EngineHealth:
        samples = [sample for call in self._calls for sample in call.samples if sample.finish is None]
        running = sum(bool(sample.tokens) for sample in samples)
        since = time.monotonic() - _RATE_SECONDS
        return EngineHealth(
            alive=not self._closed,
            asleep=False,
            running=running,
            waiting=len(samples) - running,
            tokens_per_second=sum(count for at, count in self._rate if at >= since) / _RATE_SECONDS,
            slots_used=len(self._versions.table),
            slots=self._versions.most,
        )

    async def close(self) -> None:
        self._closed = True
        for call in self._calls:
            call.aborted = True
        await asyncio.gather(*self._tasks.values())
        self._versions.table.clear()


def texts_of(batch: Batch) -> Iterator[Text]:
    """Yield each prompt with each of its completions, to be scored from the completion on."""
    for prompt, completions in batch.groups():
        for completion in completions:
            yield np.concatenate([prompt, completion]), len(prompt)


def _micro_batches(texts: Iterable[Text], tokens: int) -> Iterator[list[Text]]:
    """Yield texts in their order, cut so that no padded micro-batch has more tokens, unless one text has."""
    part: list[Text] = []
    longest = 0
    for text in texts:
        longest = max(longest, len(text[0]))
        if part and (len(part) + 1) * longest > tokens:
            yield part
            part = []
            longest = len(text[0])
        part.append(text)
    if part:
        yield part
