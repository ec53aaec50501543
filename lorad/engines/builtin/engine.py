"""The builtin engine.

The asyncio loop keeps the books; every tensor is touched on the pool's compute thread.
"""

import asyncio
import contextlib
import statistics
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from lorad.engines.base import (
    BASE,
    AdapterSource,
    Engine,
    EngineCapabilities,
    EngineHealth,
    LoadedVersion,
    Scored,
    check_request,
    check_texts,
    routes_of,
)
from lorad.engines.builtin.calls import Call, Decoder, HeldLora
from lorad.engines.builtin.decode import SEEN, DecodeBatch, Report
from lorad.engines.builtin.prefix import PrefixCache
from lorad.engines.versions import Versions, receive
from lorad.errors import Conflict, SpecError
from lorad.models.attention import CausalAttention
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.decoder import hidden, logits
from lorad.models.delta.states import bytes_per_row
from lorad.models.directory import linear_shapes
from lorad.models.experts import Recording, route_shape
from lorad.models.kv import bytes_per_token
from lorad.models.lora import FrozenLora
from lorad.models.merge import Merger
from lorad.models.turns import FIRST_SHARE, WORK, Account, Party, Payer, Work, caller
from lorad.protocol.batch import Batch, Chunk, Prompt, Ranked, Sampling

QUANTUM = 0.01  # seconds of decoding before the compute thread turns to the next in line
_RATE_SECONDS = 5.0
_PREFIX_SHARE = 8  # one in so many of the cache's bytes keeps beginnings of prompts
MAX_RANK = 512
_FORWARD_TOKENS = 8192  # per micro-batch, padding included
_LOGITS = 1 << 24  # numbers held at once
_Row = tuple[np.ndarray, int]
"""(tokens of prompt and completion, length of the prompt)"""


class SharedDecode(Account, Work):
    """The decode batch as one party in the turns: it has the summed weight of all that have a call in it.

    A party whose share of the rows exceeds its share of the weight owes the difference, which lowers what
    others owe.
    """

    # who trains joins it the sooner: a step with everybody's rows costs little more than one with a few
    haste = 0.03

    def __init__(self, batch: DecodeBatch) -> None:
        self.batch = batch

    @property
    def parties(self) -> Collection[Party]:
        return dict.fromkeys(call.caller.party for call in self.batch.calls)

    @property
    def account(self) -> Account:
        return self

    def parts(self) -> Iterable[tuple[Account, float]]:
        parties = self.parties
        parts: list[tuple[Account, float]] = [(self, 1.0)]
        if len(parties) > 1 and self.batch.groups:
            rows = Counter(group.call.caller.party for group in self.batch.groups)
            weight = sum(party.weight for party in parties)
            parts += [(party, rows[party] / rows.total() - party.weight / weight) for party in parties]
        return parts

    def payers(self) -> Mapping[Payer, float]:
        """Return the rows of each payer; where nobody has one yet, the calls."""
        calls = [group.call for group in self.batch.groups] or self.batch.calls
        return Counter(call.caller.payer for call in calls)

    def wait(self, seconds: float) -> None:
        for call in self.batch.calls:
            call.caller.wait(seconds)

    def ran(self, seconds: float) -> None:
        """A quantum has ended: calls without a row have waited for it as well."""
        if self.batch.pending:
            with_rows = {group.call for group in self.batch.groups}
            for call in self.batch.calls:
                if call not in with_rows:
                    call.caller.wait(seconds)


class _Budget:
    """So many bytes, first come first served; who wants more than all of them gets all.

    Belongs to one asyncio loop.
    """

    def __init__(self, most: int) -> None:
        self.most = self.left = most
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Wait until so much is free, and give it back in the end."""
        size = min(size, self.most)
        async with self._turn:
            while size > self.left:
                self._freed.clear()
                await self._freed.wait()
            self.left -= size
        try:
            yield
        finally:
            self.left += size
            self._freed.set()


class BuiltinEngine(Engine):
    """Serves a base that it shares with the trainer of its pool, and frozen copies of adapter versions.

    Attributes:
        directory: The model's directory; its tokenizer finds stop strings.
        max_rows, cache_bytes: See `DecodeBatch`. Without `mix_calls`, who goes first has `FIRST_SHARE` of the
            bytes in addition, so as not to wait for the calls of runs.
        mix_calls: Decode the samples of all calls in one batch, whatever their versions, and keep beginnings
            of prompts. That gives more tokens per second, but rounding then depends on what else is running.
            Off (the default on a CPU), equal calls give equal bits.
    """

    def __init__(
        self,
        base: Base,
        compute: Compute,
        directory: Path,
        *,
        max_versions: int = 64,
        max_rows: int = 256,
        cache_bytes: int = 2 << 30,
        mix_calls: bool | None = None,
    ) -> None:
        self._base = base
        self._compute = compute
        self._directory = directory
        self._versions = Versions(max_versions, HeldLora(BASE, ""))
        self._models = Merger(base)
        self._max_rows = max_rows
        self._mix_calls = base.device.type != "cpu" if mix_calls is None else mix_calls
        prefix_bytes = cache_bytes // _PREFIX_SHARE if self._mix_calls else 0
        self._cache_bytes = cache_bytes - prefix_bytes
        self._prefixes = PrefixCache(prefix_bytes) if prefix_bytes else None
        self._budget = _Budget(self._cache_bytes)
        self._first = _Budget(int(FIRST_SHARE * self._cache_bytes))
        self._shared: DecodeBatch | None = None
        self._tasks: dict[DecodeBatch, asyncio.Task[None]] = {}
        self._calls: list[Call] = []
        self._rate: deque[tuple[float, int]] = deque()
        self._seen: deque[int] = deque(maxlen=SEEN)
        self._decoder: Decoder | None = None
        self._closed = False

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            dtype=str(self._base.dtype).removeprefix("torch."),
            max_rank=MAX_RANK,
            max_versions=self._versions.most,
            max_tokens=self._base.config.max_position_embeddings,
            memory_source=True,
            sleep=False,
            bit_stable=self._base.device.type == "cpu" and not self._mix_calls,
            ranks=True,
            routes=route_shape(self._base),
        )

    async def load(self, name: str, source: AdapterSource) -> LoadedVersion:
        self._versions.reserve(name)
        try:
            shapes = linear_shapes(self._base.config)
            if source.adapter is not None and source.adapter.is_known:  # nothing to hash
                adapter = receive(source, shapes, MAX_RANK)
            else:
                adapter = await asyncio.to_thread(receive, source, shapes, MAX_RANK)
            scales = adapter.config.scale, adapter.config.scale_of_experts
            lora = await self._compute.run(FrozenLora, self._base, adapter.tensors, *scales)
        except BaseException:
            self._versions.release(name)
            raise
        loaded = HeldLora(name, source.digest, lora)
        self._versions.put(loaded)
        return loaded.describe()

    async def unload(self, name: str) -> None:
        removed = await self._versions.remove(name)
        await self._compute.run(self._models.forget, removed.lora)

    async def loaded(self) -> Sequence[LoadedVersion]:
        return [version.describe() for version in self._versions.table.values()]

    async def generate(
        self, request: str, version: str, prompts: Sequence[Prompt], sampling: Sampling
    ) -> AsyncIterator[Chunk]:
        config = self._base.config
        check_request(prompts, sampling, config.vocab_size, config.max_position_embeddings)
        if sampling.schema:
            raise SpecError("the builtin engine follows no JSON schema", hint="Use SGLang or vLLM.")
        decoder = await self._decoder_for(sampling)
        with self._versions.use(version) as loaded:
            call = Call(request, loaded, prompts, sampling, decoder, caller())
            self._calls.append(call)
            asked = time.perf_counter()
            try:
                # a shared batch has a limit of its own
                needed = 0
                if not self._mix_calls:
                    needed = call.most_tokens * bytes_per_token(self._base)
                    needed += len(call.samples) * bytes_per_row(self._base)
                async with self._own(call).hold(needed):
                    call.caller.wait(time.perf_counter() - asked)
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

    def _own(self, call: Call) -> _Budget:
        """Return the memory budget of a call whose batch is its own."""
        return self._first if call.goes_first and not self._mix_calls else self._budget

    async def _decoder_for(self, sampling: Sampling) -> Decoder | None:
        """Return the model's tokenizer, read when stop strings first need it."""
        if sampling.stop and self._decoder is None:
            path = self._directory / "tokenizer.json"
            if not path.is_file():
                raise SpecError(
                    f"{path} is missing, so stop strings cannot be found", hint="use stop_token_ids"
                )
            self._decoder = await asyncio.to_thread(Tokenizer.from_file, str(path))
        return self._decoder

    async def _start(self, call: Call) -> None:
        """Put a call into a decode batch, and see that somebody drives it."""
        if self._closed:
            raise Conflict("the engine is closed")
        batch = self._shared
        if not self._mix_calls or batch is None or not await self._compute.run(batch.join, call):
            batch = DecodeBatch(
                self._models, self._max_rows, self._own(call).most, self._prefixes, self._seen
            )
            self._shared = batch
            batch.join(call)  # the compute thread has not seen it yet
        task = self._tasks.get(batch)
        if task is None or task.done():
            self._tasks[batch] = asyncio.create_task(self._drive(batch))

    async def _drive(self, batch: DecodeBatch) -> None:
        """Quantum after quantum until the batch is empty.

        A failed quantum ends the calls in it, nothing else.
        """
        loop = asyncio.get_running_loop()
        shared = SharedDecode(batch)
        if self._mix_calls:
            WORK.set(shared)

        def quantum() -> bool | None:
            started = time.perf_counter()
            if reports := batch.run(QUANTUM):
                loop.call_soon_threadsafe(self._tell, reports)
            shared.ran(time.perf_counter() - started)
            return None if batch.calls else True

        try:
            while batch.calls:
                await self._compute.until(quantum)
        except Exception as error:
            self._shared = None if self._shared is batch else self._shared
            for call in batch.calls:
                call.queue.put_nowait(error)
        finally:
            self._tasks.pop(batch, None)

    def _tell(self, reports: list[Report]) -> None:
        for call, chunks, ended in reports:
            self._rate.append((time.monotonic(), call.more()))
            while self._rate and self._rate[0][0] < time.monotonic() - _RATE_SECONDS:
                self._rate.popleft()
            call.queue.put_nowait(chunks)
            if ended:
                call.queue.put_nowait(None)

    async def score(self, version: str, batch: Batch) -> np.ndarray:
        batch.check()
        with self._versions.use(version) as loaded:
            quanta = (
                partial(_completion_logprobs, self._models, rows, loaded.lora)
                for rows in _micro_batches(_rows_of(batch))
            )
            return np.concatenate(await self._compute.each(quanta))

    async def routed_scores(self, version: str, batch: Batch) -> Sequence[Scored]:
        batch.check()
        with self._versions.use(version) as loaded:
            quanta = (
                partial(_routed_logprobs, self._models, rows, loaded.lora)
                for rows in _micro_batches(_rows_of(batch))
            )
            parts = await self._compute.each(quanta)
        logprobs = np.concatenate([part for part, _ in parts])
        return [Scored(logprobs, routes_of(batch, [row for _, rows in parts for row in rows]))]

    async def ranked(
        self, version: str, texts: Sequence[np.ndarray], starts: Sequence[int], most: int
    ) -> Ranked:
        config = self._base.config
        check_texts(texts, starts, config.vocab_size, config.max_position_embeddings)
        with self._versions.use(version) as loaded:
            quanta = (
                partial(_ranked, self._models, rows, loaded.lora, min(most, config.vocab_size))
                for rows in _micro_batches(zip(texts, starts, strict=True))
            )
            return Ranked.joined(await self._compute.each(quanta))

    async def abort(self, request: str) -> None:
        for call in self._calls:
            if call.request == request:
                call.aborted = True

    async def drain(self) -> None:
        await self._versions.drained()

    async def sleep(self) -> None:
        raise Conflict(
            "the builtin engine cannot sleep: it shares its base with the trainer", hint="use mode fused"
        )

    async def wake(self) -> None:
        """Do nothing: this engine never sleeps."""

    async def health(self) -> EngineHealth:
        samples = [sample for call in self._calls for sample in call.samples if sample.finish is None]
        running = sum(bool(sample.tokens) for sample in samples)
        since = time.monotonic() - _RATE_SECONDS
        tokens = sum(count for at, count in self._rate if at >= since)
        return EngineHealth(
            alive=not self._closed,
            asleep=False,
            running=running,
            waiting=len(samples) - running,
            tokens_per_second=tokens / _RATE_SECONDS,
            slots_used=len(self._versions.table),
            slots=self._versions.most,
            adapters_per_step=statistics.median(self._seen.copy()) if self._seen else None,
        )

    async def close(self) -> None:
        self._closed = True
        for call in self._calls:
            call.aborted = True
        await asyncio.gather(*self._tasks.values())
        self._versions.table.clear()


def _rows_of(batch: Batch) -> Iterator[_Row]:
    for prompt, completions in batch.groups():
        for completion in completions:
            yield np.concatenate([prompt, completion]), len(prompt)


def _micro_batches(all_rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """Yield rows in their order, cut so that no padded micro-batch is too large."""
    rows: list[_Row] = []
    longest = 0
    for tokens, prompt in all_rows:
        longest = max(longest, len(tokens))
        if rows and (len(rows) + 1) * longest > _FORWARD_TOKENS:
            yield rows
            rows = []
            longest = len(tokens)
        rows.append((tokens, prompt))
    if rows:
        yield rows


@torch.no_grad()
def _completion_logprobs(
    models: Merger, rows: list[_Row], version: FrozenLora | None, recording: Recording | None = None
) -> np.ndarray:
    """Return the log-probability of each completion token, row after row, at temperature 1, as float32."""
    parts = [
        logprobs.gather(1, targets[:, None])[:, 0].cpu()
        for logprobs, targets in _predicted(models, rows, version, recording)
    ]
    return torch.cat(parts).numpy()


@torch.no_grad()
def _routed_logprobs(
    models: Merger, rows: list[_Row], version: FrozenLora | None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return `_completion_logprobs` and the routes of each row; none where the base is no mixture."""
    shape = route_shape(models.base)
    if shape is None:
        return _completion_logprobs(models, rows, version), []
    recording = Recording(shape)
    logprobs = _completion_logprobs(models, rows, version, recording)
    each = np.split(recording.routes(), len(rows))
    return logprobs, [routes[: len(tokens)] for routes, (tokens, _) in zip(each, rows, strict=True)]


@torch.no_grad()
def _ranked(models: Merger, rows: list[_Row], version: FrozenLora | None, most: int) -> Ranked:
    """The same with the most likely tokens in each place."""
    parts = []
    for logprobs, targets in _predicted(models, rows, version):
        top = logprobs.topk(most, dim=1)
        tensors = logprobs.gather(1, targets[:, None])[:, 0], top.indices.to(torch.int32), top.values
        parts.append(Ranked(*(tensor.cpu().numpy() for tensor in tensors)))
    return Ranked.joined(parts)


def _predicted(
    models: Merger, rows: list[_Row], version: FrozenLora | None, recording: Recording | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (log-probabilities of all tokens, the token itself) in the places behind the prompts of rows."""
    base, lora = models.alone(version)
    longest = max(len(tokens) for tokens, _ in rows)
    ids = np.zeros((len(rows), longest), np.int64)
    predicts = np.zeros((len(rows), longest), bool)  # a position predicts the token after it
    for row, (tokens, prompt) in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        predicts[row, prompt - 1 : len(tokens) - 1] = True
    targets = torch.from_numpy(np.roll(ids, -1, axis=1)[predicts]).to(base.device)
    positions = torch.arange(longest, device=base.device)
    inputs = torch.from_numpy(ids).to(base.device)
    states = hidden(base, inputs, positions, CausalAttention(), lora, routing=recording)
    states = states[torch.from_numpy(predicts).to(base.device)]
    size = max(1, _LOGITS // base.config.vocab_size)
    for part, part_targets in zip(states.split(size), targets.split(size), strict=True):
        yield torch.log_softmax(logits(base, part, lora).float(), -1), part_targets
