"""The builtin engine."""

import asyncio
import contextlib
import statistics
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from lorad.adapters.adapter import Adapter
from lorad.engines.base import (
    BASE,
    EngineCapabilities,
    EngineHealth,
    Scored,
    routes_of,
)
from lorad.engines.builtin.calls import Call, HeldLora
from lorad.engines.builtin.decode import SEEN, DecodeBatch
from lorad.engines.builtin.local import MAX_RANK, LocalEngine, Text, texts_of
from lorad.engines.builtin.prefix import PrefixCache
from lorad.engines.versions import Versions
from lorad.errors import Conflict
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
from lorad.models.turns import FIRST_SHARE, WORK, Account, Party, Payer, Work
from lorad.protocol.batch import Batch, Ranked

QUANTUM = 0.01  # seconds of decoding before the compute thread turns to the next in line
_PREFIX_SHARE = 8  # one in so many of the cache's bytes keeps beginnings of prompts
_LOGITS = 1 << 24  # numbers held at once


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


class BuiltinEngine(LocalEngine[HeldLora]):
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
        super().__init__(
            "builtin",
            compute,
            directory,
            linear_shapes(base.config),
            Versions(max_versions, HeldLora(BASE, "")),
            base.config.vocab_size,
            base.config.max_position_embeddings,
        )
        self._base = base
        self._models = Merger(base)
        self._max_rows = max_rows
        self._mix_calls = base.device.type != "cpu" if mix_calls is None else mix_calls
        prefix_bytes = cache_bytes // _PREFIX_SHARE if self._mix_calls else 0
        self._cache_bytes = cache_bytes - prefix_bytes
        self._prefixes = PrefixCache(prefix_bytes) if prefix_bytes else None
        self._budget = _Budget(self._cache_bytes)
        self._first = _Budget(int(FIRST_SHARE * self._cache_bytes))
        self._shared: DecodeBatch | None = None
        self._seen: deque[int] = deque(maxlen=SEEN)

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            dtype=str(self._base.dtype).removeprefix("torch."),
            max_rank=MAX_RANK,
            max_versions=self._versions.most,
            max_tokens=self._max_tokens,
            memory_source=True,
            sleep=False,
            bit_stable=self._base.device.type == "cpu" and not self._mix_calls,
            ranks=True,
            routes=route_shape(self._base),
        )

    async def unload(self, name: str) -> None:
        removed = await self._versions.remove(name)
        keeper = self._models if self._shared is None else self._shared.stepper
        await self._compute.run(keeper.forget, removed.lora)

    def lend(self) -> list[torch.Tensor] | None:
        """Return what `DecodeBatch.lend` does; only on the compute thread, for a quantum. None also without
        `mix_calls`, as there may be several batches then.
        """
        if not self._mix_calls:
            return None
        return [] if self._shared is None else self._shared.lend()

    async def _placed(self, name: str, digest: str, adapter: Adapter) -> HeldLora:
        scales = adapter.config.scale, adapter.config.scale_of_experts
        # not on the compute thread: nothing waits meanwhile
        lora = await asyncio.to_thread(FrozenLora, self._base, adapter.tensors, *scales)
        return HeldLora(name, digest, lora)

    @contextlib.asynccontextmanager
    async def _room(self, call: Call) -> AsyncIterator[None]:
        began = time.perf_counter()
        needed = 0  # a shared batch has a limit of its own
        if not self._mix_calls:
            needed = call.most_tokens * bytes_per_token(self._base)
            needed += len(call.samples) * bytes_per_row(self._base)
        async with self._own(call).hold(needed):
            call.caller.wait(time.perf_counter() - began)
            yield

    def _own(self, call: Call) -> _Budget:
        """Return the memory budget of a call whose batch is its own."""
        return self._first if call.goes_first and not self._mix_calls else self._budget

    async def _start(self, call: Call) -> None:
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

    async def score(self, version: str, batch: Batch) -> np.ndarray:
        batch.check()
        return np.concatenate(await self.forward_each(version, texts_of(batch), self._logprobs))

    async def routed_scores(self, version: str, batch: Batch) -> Sequence[Scored]:
        batch.check()
        parts = await self.forward_each(version, texts_of(batch), self._routed_logprobs)
        logprobs = np.concatenate([part for part, _ in parts])
        return [Scored(logprobs, routes_of(batch, [row for _, rows in parts for row in rows]))]

    @torch.no_grad()
    def _logprobs(
        self, texts: list[Text], version: HeldLora, recording: Recording | None = None
    ) -> np.ndarray:
        """Return the float32 log-probability of each completion token, row after row, at temperature 1."""
        parts = [
            logprobs.gather(1, targets[:, None])[:, 0].cpu()
            for logprobs, targets in _predicted(self._models, texts, version.lora, recording)
        ]
        return torch.cat(parts).numpy()

    def _routed_logprobs(self, texts: list[Text], version: HeldLora) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return `_logprobs` and the routes of each row; none where the base is no mixture."""
        shape = route_shape(self._base)
        if shape is None:
            return self._logprobs(texts, version), []
        recording = Recording(shape)
        logprobs = self._logprobs(texts, version, recording)
        each = np.split(recording.routes(), len(texts))
        return logprobs, [routes[: len(tokens)] for routes, (tokens, _) in zip(each, texts, strict=True)]

    @torch.no_grad()
    def _rank(self, most: int, texts: list[Text], version: HeldLora) -> Ranked:
        parts = []
        for logprobs, targets in _predicted(self._models, texts, version.lora):
            top = logprobs.topk(most, dim=1)
            tensors = logprobs.gather(1, targets[:, None])[:, 0], top.indices.to(torch.int32), top.values
            parts.append(Ranked(*(tensor.cpu().numpy() for tensor in tensors)))
        return Ranked.joined(parts)

    async def sleep(self) -> None:
        raise Conflict(
            "the builtin engine cannot sleep: it shares its base with the trainer", hint="use mode fused"
        )

    async def health(self) -> EngineHealth:
        adapters = statistics.median(self._seen.copy()) if self._seen else None
        return replace(await super().health(), adapters_per_step=adapters)


def _predicted(
    models: Merger, rows: list[Text], version: FrozenLora | None, recording: Recording | None = None
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
