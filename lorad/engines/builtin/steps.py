"""The rows of a decode batch, and who runs a step: call by call on a CPU; on a GPU from CUDA graphs, so that
launching costs nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from lorad.engines.builtin.calls import Sample
from lorad.engines.builtin.prompts import PromptShape, SharedPrompts
from lorad.engines.builtin.sampler import Steps, keys_of, sample
from lorad.models.base import Base
from lorad.models.decoder import hidden, logits
from lorad.models.experts import Recording
from lorad.models.kv import DecodeAttention, KVCache
from lorad.models.lora import FrozenLora, LoraApply, MixedLora, Signature, number_of, signature
from lorad.models.merge import Merger
from lorad.models.ops import upload

Result = torch.Tensor  # float64 [rows, 2]: a token, and its log-probability, so that one copy fetches both
_Loras = Sequence[FrozenLora | None]
Outcome = tuple[Result, list[torch.Tensor]]  # of a step, and the experts of its tokens in each layer
Captured = Callable[[], Outcome]
Capture = Callable[[Captured], Captured]
_Bank = tuple[int, int, Signature]  # adapters, rows of each, and what they have
_Reads = _Bank | int | None  # of which copies a step reads, or the number of the adapter that it reads itself
_SPAN = 256  # tokens by which the span of a step grows at least on a GPU
_GRAPHS = 64  # kept at most
BANKS = 8  # kept at most
_MANY_ROWS = 32  # above, rows are rounded up to a multiple of this; below to a power of two


class StepShape(NamedTuple):
    """What a step's shapes depend on: rows, span of the cache (tokens), what the sampler must do, the prompts
    that rows share, if any do, and whether the experts of tokens are noted.
    """

    rows: int
    span: int
    steps: Steps
    prompts: PromptShape | None = None
    routed: bool = False


class Rows:
    """What the device knows of each row of the decode batch.

    All tensors have one entry per row of capacity and are changed in place, so that a step can be captured
    once and replayed: its shapes depend on the number of rows and the span of the cache, its addresses on
    nothing.

    tokens: to be fed next.
    lengths: tokens in the cache.
    keys, counts, parameters: see `sampler`.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.lengths, self.keys, self.counts = (torch.zeros_like(self.tokens) for _ in range(3))
        self.parameters = torch.ones(capacity, 3, device=device)

    @property
    def capacity(self) -> int:
        return len(self.tokens)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.lengths, self.keys, self.counts, self.parameters

    def grow(self, capacity: int, used: int) -> None:
        larger = Rows(capacity, self.tokens.device)
        for new, old in zip(larger._tensors(), self._tensors(), strict=True):
            new[:used] = old[:used]
        self.tokens, self.lengths, self.keys, self.counts, self.parameters = larger._tensors()

    def copy(self) -> "Rows":
        twin = Rows(0, self.tokens.device)
        twin.tokens, twin.lengths, twin.keys, twin.counts, twin.parameters = (
            t.clone() for t in self._tensors()
        )
        return twin

    def restore(self, before: "Rows") -> None:
        """Be again what `copy` gave."""
        for tensor, old in zip(self._tensors(), before._tensors(), strict=True):
            tensor.copy_(old)

    def put(self, start: int, state: Sequence[torch.Tensor]) -> None:
        """Fill rows from `start` on with new numbers for each tensor of this class, in their order."""
        for tensor, new in zip(self._tensors(), state, strict=True):
            tensor[start : start + len(new)] = new

    def rewind(self, tokens: Sequence[int]) -> None:
        """Have the first rows do their last step again, into which these tokens were fed."""
        count = len(tokens)
        (self.tokens[:count],) = upload([np.array(tokens)], self.tokens.device)
        self.lengths[:count] -= 1
        self.counts[:count] -= 1

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows `sources` over rows `targets`, both int64."""
        for tensor in self._tensors():
            tensor[targets] = tensor[sources]


def seeds_of(samples: Sequence[Sample]) -> np.ndarray:
    """Return the keys of samples, int64 [n]."""
    return keys_of(np.array([sample.seed for sample in samples], np.uint64)).numpy()


def joined(tokens: torch.Tensor, logprobs: torch.Tensor) -> Result:
    """Put tokens, int64 [n], and their log-probabilities, float32 [n], into one tensor, which holds both
    exactly.
    """
    both = logprobs.new_empty((len(tokens), 2), dtype=torch.float64)
    both[:, 0] = tokens
    both[:, 1] = logprobs
    return both


class Memory(NamedTuple):
    """What a step reads and writes."""

    rows: Rows
    cache: KVCache
    prompts: SharedPrompts

    @property
    def place(self) -> tuple[object, ...]:
        """Where rows and cache lie: a captured step is of use as long as this is the same, and where shared
        prompts lie if it attends to any.
        """
        rows, cache, _ = self
        return cache.shape, cache.layers[0].data_ptr(), rows.tokens.data_ptr()


def _step(
    base: Base, lora: LoraApply | None, memory: Memory, shape: StepShape, recording: Recording | None = None
) -> Result:
    """Feed one token to each of the first rows and sample the next."""
    rows, cache, prompts = memory
    active = slice(None, shape.rows)
    most = base.config.max_position_embeddings
    positions = rows.lengths[active].clamp(max=most - 1)  # rows that are padding run on and on
    places = positions
    before = None
    if shape.prompts is not None:
        places = positions - prompts.begins[active]
        before = prompts.attention(positions, shape.prompts)
    attention = DecodeAttention(cache, places.clamp(0, cache.length - 1), shape.span, before)
    ids = rows.tokens[active, None]
    states = hidden(base, ids, positions[:, None], attention, lora, routing=recording)
    scores = logits(base, states[:, 0], lora)
    tokens, logprobs = sample(
        scores, rows.keys[active], rows.counts[active], rows.parameters[active], shape.steps
    )
    # idle rows go on with what they drew, whatever it is
    rows.tokens[active] = tokens.clamp(min=0) if shape.steps.bounded else tokens
    rows.lengths[active] += 1
    rows.counts[active] += 1
    return joined(tokens, logprobs)


class Stepper(Protocol):
    """Runs steps for one decode batch. keeps_cache: it must stay where it is,
    also while there are no rows.
    """

    keeps_cache: bool

    def padded(self, rows: int) -> int:
        """Return how many rows a step of `rows` really has: there must be slots for them."""
        ...

    def span(self, tokens: int) -> int:
        """Return how many tokens a step attends to that must attend to so many."""
        ...

    def bind(self, loras: _Loras) -> None:
        """Says which adapter each row has from now on."""
        ...

    def run(self, memory: Memory, shape: StepShape, recording: Recording | None = None) -> Result: ...

    def forget(self, lora: FrozenLora | None) -> None:
        """Drop what is kept for an adapter that no row will have again."""
        ...


def stepper(models: Merger, bank_bytes: int) -> Stepper:
    """Return what runs the steps of a base: it captures them on a GPU, where that is possible."""
    if is_captured(models.base):
        return GraphedSteps(models, _CudaGraphs, bank_bytes)
    return EagerSteps(models, rounds=models.base.device.type == "cuda")


def is_captured(base: Base) -> bool:
    """Return whether steps of a base are captured, for which adapters are copied.

    Those of gated delta nets are not, since the warm-up of a capture would change their states. Those of
    mixtures are where torch's grouped product needs no sizes on the host: in bfloat16, from compute
    capability 9.0 on (pytorch#169970).
    """
    if base.device.type != "cuda" or base.config.delta is not None:
        return False
    if base.config.experts is None:
        return True
    return base.dtype == torch.bfloat16 and torch.cuda.get_device_capability(base.device) >= (9, 0)


def _distinct(loras: _Loras) -> tuple[list[FrozenLora | None], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return the adapters in order of their first row, and the index of each row's."""
    numbers: dict[FrozenLora | None, int] = {}
    owner = np.array([numbers.setdefault(lora, len(numbers)) for lora in loras], np.int64)
    return list(numbers), owner


def _rounded(tokens: int) -> int:
    """Round a span up so that few exist, none more than a quarter too long beyond 1,024 tokens."""
    step = max(_SPAN, (1 << (tokens - 1).bit_length()) >> 3)
    return -(-tokens // step) * step


class EagerSteps:
    """Exactly as many rows as there are. rounds: the span is rounded up, since libraries of a GPU choose a
    kernel anew for each shape, and a span grows with every token.
    """

    keeps_cache = False

    def __init__(self, models: Merger, *, rounds: bool) -> None:
        self.models = models
        self.base = models.base
        self.rounds = rounds
        self.lora: LoraApply | None = None

    def padded(self, rows: int) -> int:
        return rows

    def span(self, tokens: int) -> int:
        return _rounded(tokens) if self.rounds else tokens

    def bind(self, loras: _Loras) -> None:
        distinct, owner = _distinct(loras)
        if len(distinct) < 2:
            self.base, self.lora = self.models.alone(distinct[0] if distinct else None)
            return
        if not (
            isinstance(self.lora, MixedLora) and self.lora.numbers == [number_of(lora) for lora in distinct]
        ):
            self.base = self.models.base
            self.lora = MixedLora(self.models.base, distinct)
        self.lora.assign(owner)

    def run(self, memory: Memory, shape: StepShape, recording: Recording | None = None) -> Result:
        span = min(memory.cache.length, self.span(shape.span))
        return _step(self.base, self.lora, memory, shape._replace(span=span), recording)

    def forget(self, lora: FrozenLora | None) -> None:
        self.models.forget(lora)


class GraphedSteps:
    """Rows, span and rows per adapter are rounded up, so that few different steps exist; each is captured
    once.

    Adapters are copied into buffers of a `MixedLora`, one for each number of adapters, rows of each, and
    signature. These have `bank_bytes` together, or one of them more. An adapter on experts may be as large as
    the base: alone it is not copied, and steps read it itself; with others it is, while there are rows.
    capturing: gives what captures: it makes something that can be replayed of a step, which then reads and
    writes the same memory each time. A new one is asked for when all that was captured is dropped.
    """

    keeps_cache = True

    def __init__(self, models: Merger, capturing: Callable[[], Capture], bank_bytes: int) -> None:
        self.models = models
        self.capturing = capturing
        self.bank_bytes = bank_bytes
        self.capture = capturing()
        self.banks: OrderedDict[_Bank, MixedLora] = OrderedDict()
        self.bank: _Bank | None = None
        self.alone: FrozenLora | None = None  # what is bound without a copy
        self.numbers: list[int] = []  # of the adapters that have the signature
        self.signature: Signature = ()
        self.graphs: OrderedDict[tuple[StepShape, _Reads], Captured] = OrderedDict()
        self.place: tuple[object, ...] = ()
        self.prompts: tuple[object, ...] = ()

    def padded(self, rows: int) -> int:
        if rows > _MANY_ROWS:
            return -(-rows // _MANY_ROWS) * _MANY_ROWS
        return 1 << (rows - 1).bit_length() if rows else 0

    def span(self, tokens: int) -> int:
        return _rounded(tokens)

    def bind(self, loras: _Loras) -> None:
        distinct, owner = _distinct(loras)
        self.bank = self.alone = None
        count = len(distinct)
        if count == 1 and distinct[0] is not None and distinct[0].of_experts:
            self.alone = distinct[0]
        if self.alone is not None or not any(distinct):
            self._forget_banks()
            return
        per = self.padded(int(np.bincount(owner).max())) if count > 1 else 0
        if (numbers := [number_of(lora) for lora in distinct]) != self.numbers:
            self.numbers = numbers
            self.signature = signature(self.models.base, distinct)
        key = self.bank = count, per, self.signature
        if key not in self.banks:
            self.banks[key] = MixedLora(self.models.base, distinct, per, self.padded(count * per))
            self._forget_banks()
        self.banks.move_to_end(key)
        self.banks[key].fill(distinct)
        self.banks[key].assign(owner)

    def _forget_banks(self) -> None:
        """Forget the least recently used beyond `BANKS` or their bytes, with the steps that read them. One
        stays, unless it has adapters on experts and no row needs it.
        """
        while len(self.banks) > BANKS or sum(bank.nbytes for bank in self.banks.values()) > self.bank_bytes:
            gone, bank = next(iter(self.banks.items()))
            if len(self.banks) == 1 and (self.bank is not None or not bank.of_experts):
                break
            del self.banks[gone]
            self._drop(gone)

    def _drop(self, reads: _Reads) -> None:
        for key in [key for key in self.graphs if key[1] == reads]:
            del self.graphs[key]

    def forget(self, lora: FrozenLora | None) -> None:
        self.models.forget(lora)
        if lora is not None:
            self._drop(lora.number)

    def run(self, memory: Memory, shape: StepShape, recording: Recording | None = None) -> Result:
        """Rows beyond those asked for run idly: they write into slots that nobody reads."""
        # steps that read or write what lies elsewhere now are dropped
        if memory.place != self.place:
            self.graphs.clear()
            self.place = memory.place
            self.capture = self.capturing()
        if memory.prompts.place != self.prompts:
            self.graphs = OrderedDict(
                (key, graph) for key, graph in self.graphs.items() if key[0].prompts is None
            )
            self.prompts = memory.prompts.place
        span = min(memory.cache.length, self.span(shape.span))
        padded = shape._replace(rows=self.padded(shape.rows), span=span, routed=recording is not None)
        lora: LoraApply | None = self.alone if self.bank is None else self.banks[self.bank]
        key = padded, self.bank if self.alone is None else self.alone.number
        if key not in self.graphs:

            def step() -> Outcome:
                routes = None if recording is None else Recording(recording.shape)
                result = _step(self.models.base, lora, memory, padded, routes)
                return result, [] if routes is None else routes.layers

            before = memory.rows.copy()
            self.graphs[key] = self.capture(step)
            # capturing runs the step to warm up; what it wrote into the cache is written again
            memory.rows.restore(before)
            if len(self.graphs) > _GRAPHS:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(key)
        result, layers = self.graphs[key]()
        if recording is not None:
            recording.layers = layers
        return result[: shape.rows]


class _CudaGraphs:
    """Captures steps. All share one pool of memory: they never run at once, and results are read before the
    next.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Captured) -> Captured:
        """A replay of `run`, which is run twice before it is captured: kernels are chosen and libraries set
        up then.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            outcome = run()

        def replay() -> Outcome:
            graph.replay()
            return outcome

        return replay
