"""The bytes that a pass keeps for its backward, by which micro-batches are made. Imports no torch."""

from typing import NamedTuple

from lorad.adapters.targets import HEAD
from lorad.models.facts import ModelFacts

MOST = 16384  # tokens of a micro-batch
MOST_SQUARED = 2048
"""The same where attention holds tokens x tokens for each head: 71 MB of each at 2,048 tokens, measured."""
LEAST = 1024
PLENTY = 4096
"""Tokens of a micro-batch on a GPU below which larger ones that recompute are quicker. With the shape of
Qwen3-8B on an H100, micro-batches of 1,024 tokens trained 2,600 tokens a second, of 2,048 4,600, of 4,096
7,800; those of 8,192 that were recomputed trained 6,900 (docs/lab/gpu-day.md)."""
ADAPTERS = 4  # one in so many bytes that bases leave is for adapters, another for activations
CPU_CACHE = 2 << 30  # bytes for keys and values of an engine in the pool, which a small machine never fills
_KEPT = 1.4
_DROPOUT = 0.7
"""What a pass keeps for its backward, in sizes of the inputs and outputs of its linears: measured as 1.15
(builtin) and 1.1 to 1.3 (transformers with PEFT); with dropout, which keeps its masks and what it made of the
inputs, 0.65 more; with DoRA, which keeps the outputs, 0.5 (builtin), for which the same is set aside."""
_RECURRED = 10 * 4
"""Bytes that the backward of one gated delta net makes again for each number of a token that it reads and
writes: measured as 7 to 10 float32 in runs of 16 to 300 tokens. No other layer's are there at that time."""


class _TokenBytes(NamedTuple):
    """Bytes that a token keeps, that it keeps more with dropout or DoRA, and with activation checkpointing.

    recomputed: one layer's included.
    """

    token: int
    dropout: int
    recomputed: int


def kept(facts: ModelFacts, width: int, parts: int = 1) -> _TokenBytes:
    """Foresee what a token of a model keeps, of `width` bytes a number and cut over `parts` ranks."""
    dense = sum(sum(shape) for name, shape in facts.linears.items() if name != HEAD)
    experts = sum(sum(shape) for shape in facts.experts.values())
    of_experts = sum(out * into for out, into in facts.experts.values())
    met = 1 - (facts.parameters - facts.active) / of_experts if of_experts else 0.0  # by one token
    numbers = (dense + int(experts * met)) // parts
    states = facts.hidden_size * facts.layers // parts
    layer = numbers // max(1, facts.layers)
    again = _RECURRED * facts.recurred
    return _TokenBytes(
        token=int(_KEPT * numbers * width) + again,
        dropout=int(_DROPOUT * numbers * width),
        recomputed=int((states + _KEPT * layer) * width) + again,
    )


def on_cpu(granted: float, bases: int, ranks: int = 1) -> int:
    """Return the bytes for activations of each rank, of those that a pool with such bases is granted."""
    return max(0, int(granted) - bases - CPU_CACHE) // ADAPTERS // ranks
