"""The engine over a model of transformers."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers

from lorad.adapters.adapter import Adapter
from lorad.engines.base import BASE, EngineCapabilities
from lorad.engines.builtin.calls import Call
from lorad.engines.builtin.local import FORWARD_TOKENS, MAX_RANK, LocalEngine, Text, texts_of
from lorad.engines.generic.decode import GenericBatch, HeldRows
from lorad.engines.generic.model import GenericModel, SharedBase
from lorad.engines.versions import Versions
from lorad.errors import Conflict
from lorad.models.compute import Compute
from lorad.protocol.batch import Batch, Ranked

_QUANTUM = 0.01  # seconds of decoding before the compute thread turns to the next in line
_SCORES = 1 << 27  # numbers that a forward gives
_MAX_VERSIONS = 64
_MAX_ROWS = 64  # samples that are decoded at once


class TransformersEngine(LocalEngine[HeldRows]):
    """Serves a base that transformers computes, and adapters on its linears.

    model: the base; nobody else calls it.
    directory: the directory of the base, whose tokenizer finds stop strings.
    shapes: (out, in) of the base's linears.
    mix_calls: decode samples of all calls at once. Rounding then depends on what else is running; without it,
        equal calls give equal bits on a CPU.
    """

    def __init__(
        self,
        model: GenericModel,
        compute: Compute,
        directory: Path,
        shapes: Mapping[str, tuple[int, int]],
        *,
        cache_bytes: int,
        mix_calls: bool,
    ) -> None:
        super().__init__(
            "transformers",
            compute,
            directory,
            {name: shape for name, shape in shapes.items() if name in model.linears},
            Versions(_MAX_VERSIONS, HeldRows(BASE, "")),
            model.vocab_size,
            model.max_tokens,
            min(FORWARD_TOKENS, _SCORES // model.vocab_size),
        )
        self._model = model
        self._cache_bytes = cache_bytes
        self._mix_calls = mix_calls
        self._shared: GenericBatch | None = None

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
        """Load the model of a directory on the compute thread and serve it.

        place: gives dtype and device.
        cache: gives the bytes for keys and values, once the model is loaded.
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
            max_rank=MAX_RANK,
            max_versions=self._versions.most,
            max_tokens=self._max_tokens,
            memory_source=True,
            sleep=False,
            bit_stable=self._model.device.type == "cpu" and not self._mix_calls,
            ranks=True,
        )

    def software(self) -> dict[str, str]:
        return {"transformers": transformers.__version__}

    async def _placed(self, name: str, digest: str, adapter: Adapter) -> HeldRows:
        return HeldRows(name, digest, rows=await self._compute.run(self._model.load, adapter))

    async def _start(self, call: Call) -> None:
        """Put a call into the batch of all calls, or into one of its own that waits for its turn."""
        if self._closed:
            raise Conflict("the engine is closed")
        if self._mix_calls and self._shared is not None:
            self._shared.arriving.append(call)
            return
        batch = GenericBatch(self._model, _MAX_ROWS, self._cache_bytes)
        batch.arriving.append(call)
        if self._mix_calls:
            self._shared = batch
        self._tasks[batch] = asyncio.create_task(self._drive(batch))

    async def _drive(self, batch: GenericBatch) -> None:
        """Run quantum after quantum until the batch is empty; a failed one ends the calls in it."""
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
            self._tasks.pop(batch, None)
            if self._shared is batch:
                self._shared = None

    async def score(self, version: str, batch: Batch) -> np.ndarray:
        batch.check()
        return Ranked.joined(
            await self.forward_each(version, texts_of(batch), partial(self._rank, 0))
        ).logprobs

    async def sleep(self) -> None:
        raise Conflict("the transformers engine cannot sleep", hint="use pool.mode: resident")

    @torch.no_grad()
    def _rank(self, most: int, texts: list[Text], version: HeldRows) -> Ranked:
        """Rank texts in one forward, padded behind their ends, which a causal model never looks at."""
        longest = max(len(tokens) for tokens, _ in texts)
        ids = torch.zeros(len(texts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (tokens, _) in enumerate(texts):
            ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            mask[row, : len(tokens)] = 1
        model = self._model
        logits = model.forward(
            [version.rows] * len(texts),
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
