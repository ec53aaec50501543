"""Who runs a step: call by call on a CPU; on a GPU from CUDA graphs, so that launching costs nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from lorad.engines.builtin.rows import Rows, Shape, step
from lorad.models.kv import KVCache
from lorad.models.lora import FrozenLora, LoraApply, MixedLora, Signature, signature
from lorad.models.merge import Merger

Result = tuple[Tensor, Tensor]  # tokens int64 [rows], logprobs float32 [rows]
K = TypeVar("K")
V = TypeVar("V")
Loras = Sequence[FrozenLora | None]

SPAN = 256  # tokens by which the span of a captured step grows
GRAPHS, BANKS = 64, 8  # kept at most
MANY_ROWS = 32  # above, rows are rounded up to a multiple of this; below to a power of two


class Stepper(Protocol):
    """Runs steps for one decode batch."""

    def padded(self, rows: int) -> int:
        """How many rows a step of so many really has: there must be slots for them."""
        ...

    def bind(self, loras: Loras) -> None:
        """Says which adapter each row has from now on."""
        ...

    def run(self, rows: Rows, cache: KVCache, shape: Shape) -> Result: ...


def stepper(models: Merger) -> Stepper:
    return GraphedSteps(models, CudaGraphs()) if models.base.device.type == "cuda" else EagerSteps(models)


def distinct(loras: Loras) -> tuple[list[FrozenLora | None], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """The adapters in order of their first row, and the index of each row's."""
    numbers: dict[FrozenLora | None, int] = {}
    owner = np.array([numbers.setdefault(lora, len(numbers)) for lora in loras], np.int64)
    return list(numbers), owner


class EagerSteps:
    """Exactly as many rows as there are."""

    def __init__(self, models: Merger) -> None:
        self.models, self.base = models, models.base
        self.lora: LoraApply | None = None

    def padded(self, rows: int) -> int:
        return rows

    def bind(self, loras: Loras) -> None:
        some, owner = distinct(loras)
        if len(some) < 2:
            self.base, self.lora = self.models.alone(some[0] if some else None)
            return
        if not (isinstance(self.lora, MixedLora) and self.lora.loras == some):
            self.base, self.lora = self.models.base, MixedLora(self.models.base, some)
        self.lora.assign(owner)

    def run(self, rows: Rows, cache: KVCache, shape: Shape) -> Result:
        return step(self.base, self.lora, rows, cache, shape)


class GraphedSteps:
    """Rows, span and rows per adapter are rounded up, so that few different steps exist; each is captured once.

    Adapters are copied into buffers of a `MixedLora`, one for each number of adapters, rows of each, and signature.
    capture: makes something that can be replayed of a step that writes its result into the same tensors each time.
    """

    def __init__(self, models: Merger, capture: Callable[[Callable[[], Result]], Callable[[], Result]]) -> None:
        self.models, self.capture = models, capture
        self.banks: OrderedDict[tuple[int, int, Signature], MixedLora] = OrderedDict()
        self.bank: MixedLora | None = None
        self.graphs: OrderedDict[tuple[Shape, MixedLora | None], Callable[[], Result]] = OrderedDict()
        self.memory: tuple[object, ...] = ()

    def padded(self, rows: int) -> int:
        if rows > MANY_ROWS:
            return -(-rows // MANY_ROWS) * MANY_ROWS
        return 1 << (rows - 1).bit_length() if rows else 0

    def bind(self, loras: Loras) -> None:
        some, owner = distinct(loras)
        if not any(some):
            self.bank = None
            return
        most = int(np.bincount(owner).max()) if len(some) > 1 else len(owner)
        key = len(some), self.padded(most), signature(self.models.base, some)
        if key not in self.banks:
            self.banks[key] = MixedLora(self.models.base, some, per=key[1])
        self.bank = _kept(self.banks, key, BANKS)
        self.bank.fill(some)
        self.bank.assign(owner, self.padded(len(owner)))

    def run(self, rows: Rows, cache: KVCache, shape: Shape) -> Result:
        """Rows beyond those asked for run idly: they write into slots that nobody reads."""
        memory = (cache.shape, cache.layers[0].data_ptr(), rows.tokens.data_ptr())
        if memory != self.memory:
            self.graphs.clear()
            self.memory = memory
        span = min(cache.length, -(-shape.span // SPAN) * SPAN)
        padded = Shape(self.padded(shape.rows), span, shape.steps)
        key = padded, self.bank
        if key not in self.graphs:
            self.graphs[key] = self._captured(rows, cache, padded)
        tokens, logprobs = _kept(self.graphs, key, GRAPHS)()
        return tokens[: shape.rows], logprobs[: shape.rows]

    def _captured(self, rows: Rows, cache: KVCache, shape: Shape) -> Callable[[], Result]:
        bank, base, before = self.bank, self.models.base, rows.copy()
        replay = self.capture(lambda: step(base, bank, rows, cache, shape))
        rows.restore(before)  # capturing runs the step to warm up; what it wrote into the cache is written again
        return replay


def _kept(table: OrderedDict[K, V], key: K, most: int) -> V:
    """The value of a key, now the most recently used; the least recently used beyond `most` leaves."""
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)
    return table[key]


class CudaGraphs:
    """Captures steps. All share one pool of memory: they never run at once, and results are read before the next."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """A replay of `run`, which is run twice before it is captured: kernels are chosen and libraries set up then."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            result = run()

        def replay() -> Result:
            graph.replay()
            return result

        return replay
