"""The engine over a model of transformers.

The asyncio loop keeps the books; every tensor is touched on the pool's compute thread.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from lorad.engines.base import (
    BASE,
    AdapterSource,
    Engine,
    EngineCapabilities,
    EngineHealth,
    LoadedVersion,
    check_request,
    check_texts,
)
from lorad.engines.builtin.calls import Call, Decoder
from lorad.engines.generic.decode import GenericBatch, HeldRows, Report
from lorad.engines.generic.model import GenericModel, RowAdapter, SharedBase
from lorad.engines.versions import Versions, receive
from lorad.errors import Conflict, SpecError
from lorad.models.compute import Compute
from lorad.models.turns import caller
from lorad.protocol.batch import Batch, Chunk, Prompt, Ranked, Sampling

_QUANTUM = 0.01  # seconds of decoding before the compute thread turns to the next in line
_RATE_SECONDS = 5.0
_MAX_RANK = 512
_FORWARD_TOKENS = 8192  # per micro-batch, padding included
_SCORES = 1 << 27  # numbers that a forward gives
_Text = tuple[np.ndarray, int]
"""Tokens, and from which on they are scored."""


class TransformersEngine(Engine):
    """Serves a base that transformers computes, and adapters on its linears.

    Args:
        model: The base; nobody else calls it.
        directory: Where it is; its tokenizer finds stop strings.
        shapes: (out, in) of the base's linears.
        mix_calls: Decode samples of all calls at once. Rounding then depends on what else is running; without
            it, equal calls give equal bits on a CPU.
    """

    def __init__(
        self,
        model: GenericModel,
        compute: Compute,
        directory: Path,
        shapes: Mapping[str, tuple[int, int]],
        *,
        max_versions: int = 64,
        max_rows: int = 64,
        cache_bytes: int = 2 << 30,
        mix_calls: bool = False,
    ) -> None:
        self._model = model
        self._compute = compute
        self._directory = directory
        self._shapes = {name: shape for name, shape in shapes.items() if name in model.linears}
        self._versions: Versions[HeldRows] = Versions(max_versions, HeldRows(BASE, ""))
        self._max_rows = max_rows
        self._cache_bytes = cache_bytes
        self._mix_calls = mix_calls
        self._shared: GenericBatch | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: list[Call] = []
        self._rate: deque[tuple[float, int]] = deque()
        self._decoder: Decoder | None = None
        self._closed = False

    @classmethod
    async def start(
        cls,
        compute: Compute,
        directory: Path,
        shapes: Mapping[str, tuple[int, int]],
        place: Callable[[], tuple[torch.dtype, torch.device]],
        cache: Callable[[GenericModel], int],
        *,
        mix_calls: bool,
    ) -> "TransformersEngine":
        """Load the model on the compute thread and serve it.

        Args:
            compute: The pool's.
            directory: Where the model is.
            shapes: (out, in) of its linears.
            place: Gives dtype and device.
            cache: Gives the bytes for keys and values, once the model is loaded.
            mix_calls: As of the engine.
        """
        model = await compute.run(lambda: GenericModel.opened(directory, *place(), shapes))
        return cls(model, compute, directory, shapes, cache_bytes=cache(model), mix_calls=mix_calls)

    @classmethod
    def on(
        cls,
        base: SharedBase,
        compute: Compute,
        directory: Path,
        shapes: Mapping[str, tuple[int, int]],
        cache: Callable[[GenericModel], int],
        *,
        mix_calls: bool,
    ) -> "TransformersEngine":
        """Serve a base that a trainer has in this process. The other arguments are those of `start`."""
        model = GenericModel(base.model, base.dtype, base.device, base.linears, base.lent)
        return cls(model, compute, directory, shapes, cache_bytes=cache(model), mix_calls=mix_calls)

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            dtype=str(self._model.dtype).removeprefix("torch."),
            max_rank=_MAX_RANK,
            max_versions=self._versions.most,
            max_tokens=self._model.max_tokens,
            memory_source=True,
            sleep=False,
            bit_stable=self._model.device.type == "cpu" and not self._mix_calls,
            ranks=True,
        )

    def software(self) -> dict[str, str]:
        return {"transformers": transformers.__version__}

    async def load(self, name: str, source: AdapterSource) -> LoadedVersion:
        self._versions.reserve(name)
        try:
            adapter = await asyncio.to_thread(receive, source, self._shapes, _MAX_RANK)
            rows = await self._compute.run(self._model.load, adapter)
        except BaseException:
            self._versions.release(name)
            raise
        version = HeldRows(name, source.digest, rows=rows)
        self._versions.put(version)
        return version.describe()

    async def unload(self, name: str) -> None:
        await self._versions.remove(name)

    async def loaded(self) -> Sequence[LoadedVersion]:
        return [version.describe() for version in self._versions.table.values()]

    async def generate(
        self, request: str, version: str, prompts: Sequence[Prompt], sampling: Sampling
    ) -> AsyncIterator[Chunk]:
        check_request(prompts, sampling, self._model.vocab_size, self._model.max_tokens)
        if sampling.schema:
            raise SpecError("the transformers engine follows no JSON schema", hint="Use SGLang or vLLM.")
        decoder = await self._decoder_for(sampling)
        with self._versions.use(version) as held_version:
            call = Call(request, held_version, prompts, sampling, decoder, caller())
            self._calls.append(call)
            try:
                self._start(call)
                while (chunks := await call.queue.get()) is not None:
                    if isinstance(chunks, Exception):
                        raise chunks
                    for chunk in chunks:
                        yield chunk
            finally:
                call.aborted = True
                call.groups.clear()  # each refers to the call: its version would wait for a collection
                self._calls.remove(call)

    async def _decoder_for(self, sampling: Sampling) -> Decoder | None:
        """Return the model's tokenizer, read when stop strings first need it."""
        if sampling.stop and self._decoder is None:
            path = self._directory / "tokenizer.json"
            if not path.is_file():
                why = f"{path} is missing, so stop strings cannot be found"
                raise SpecError(why, hint="use stop_token_ids")
            self._decoder = await asyncio.to_thread(Tokenizer.from_file, str(path))
        return self._decoder

    def _start(self, call: Call) -> None:
        """Put a call into the batch of all calls, or into one of its own that waits for its turn."""
        if self._closed:
            raise Conflict("the engine is closed")
        if self._mix_calls and self._shared is not None:
            self._shared.arriving.append(call)
            return
        batch = GenericBatch(self._model, self._max_rows, self._cache_bytes)
        batch.arriving.append(call)
        if self._mix_calls:
            self._shared = batch
        task = asyncio.create_task(self._drive(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drive(self, batch: GenericBatch) -> None:
        """Run quantum after quantum until the batch is empty.

        A failed quantum ends the calls in it, nothing else.
        """
        loop = asyncio.get_running_loop()

        def quantum() -> bool:
            if reports := batch.run(_QUANTUM):
                loop.call_soon_threadsafe(self._tell, reports)
            return True

        try:
            while batch.calls or batch.arriving:
                await self._compute.run(quantum)
        except Exception as error:
            for call in (*batch.calls, *batch.arriving):
                call.queue.put_nowait(error)
        finally:
            if self._shared is batch:
                self._shared = None

    def _tell(self, reports: list[Report]) -> None:
        now = time.monotonic()
        for call, chunks, ended in reports:
            self._rate.append((now, call.more()))
            call.queue.put_nowait(chunks)
            if ended:
                call.queue.put_nowait(None)
        while self._rate and self._rate[0][0] < now - _RATE_SECONDS:
            self._rate.popleft()

    async def score(self, version: str, batch: Batch) -> np.ndarray:
        batch.check()
        texts = [
            (np.concatenate([prompt, completion]), len(prompt))
            for prompt, completions in batch.groups()
            for completion in completions
        ]
        return (await self._ranked(version, texts, 0)).logprobs

    async def ranked(
        self, version: str, texts: Sequence[np.ndarray], starts: Sequence[int], most: int
    ) -> Ranked:
        check_texts(texts, starts, self._model.vocab_size, self._model.max_tokens)
        return await self._ranked(version, [*zip(texts, starts, strict=True)], most)

    async def _ranked(self, version: str, texts: Sequence[_Text], most: int) -> Ranked:
        most = min(most, self._model.vocab_size)
        with self._versions.use(version) as user:
            quanta = (
                partial(_scored, self._model, part, user.rows, most)
                for part in _micro_batches(texts, min(_FORWARD_TOKENS, _SCORES // self._model.vocab_size))
            )
            return Ranked.joined(await self._compute.each(quanta))

    async def abort(self, request: str) -> None:
        for call in self._calls:
            if call.request == request:
                call.aborted = True

    async def drain(self) -> None:
        await self._versions.drained()

    async def sleep(self) -> None:
        raise Conflict("the transformers engine cannot sleep", hint="use pool.mode: resident")

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
        await asyncio.gather(*self._tasks)
        self._versions.table.clear()


def _micro_batches(texts: Iterable[_Text], tokens: int) -> Iterator[list[_Text]]:
    """Yield texts in their order, cut so that no padded micro-batch has more tokens, unless one text has."""
    part: list[_Text] = []
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


@torch.no_grad()
def _scored(model: GenericModel, texts: list[_Text], adapter: RowAdapter | None, most: int) -> Ranked:
    """Return log-probabilities of the tokens of texts from their starts on, and the `most` likely in their
    places. Rows are padded behind their ends, which a causal model never looks at.
    """
    longest = max(len(tokens) for tokens, _ in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (tokens, _) in enumerate(texts):
        ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        mask[row, : len(tokens)] = 1
    logits = model.forward(
        [adapter] * len(texts),
        ids,
        attention_mask=mask.to(model.device),
        position_ids=torch.arange(longest, device=model.device).expand(len(texts), -1),
        use_cache=False,
    )
    parts = []
    for row, (tokens, start) in enumerate(texts):
        logprobs = logits[row, start - 1 : len(tokens) - 1].float().log_softmax(-1)
        top = logprobs.topk(most, dim=1)
        chosen = logprobs.gather(1, ids[row, start : len(tokens), None].to(model.device))[:, 0]
        tensors = (chosen, top.indices.to(torch.int32), top.values)
        parts.append(Ranked(*(tensor.cpu().numpy() for tensor in tensors)))
    return Ranked.joined(parts)
