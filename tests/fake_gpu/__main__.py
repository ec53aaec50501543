"""Print what a GPU would be asked for by models of real sizes: kernels, reads, copies and bytes.

    python -m tests.fake_gpu [8b] [30b]

Copies are those to the device for which the host waits, and those out of pinned memory, for which it does
not. A step of decoding has eight rows of two prompts; a pass has two groups of eight samples of 384 tokens.
"""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from lorad.engines.builtin.calls import HeldLora
from lorad.models.base import Base
from tests.fake_gpu.cuda import fake_gpu
from tests.fake_gpu.device import FakeGpu
from tests.fake_gpu.scenes import (
    PLAIN,
    base_of,
    batch_of,
    call,
    config,
    even_experts,
    gradients,
    mixture,
    slot_of,
    version,
    work_of,
)

_STEPS = 4
_RANK = 32
_HEADS = {"num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936}
SIZES: dict[str, dict[str, Any]] = {
    "8b": {
        **config(),
        **_HEADS,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "30b": {
        **mixture(),
        **_HEADS,
        "hidden_size": 2048,
        "num_hidden_layers": 4,  # of 48
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}


def main(*names: str) -> None:
    """Print a table of decoding and one of training for each size."""
    console = Console(width=110)
    for name in names or SIZES:
        console.print(_decoding(name), _training(name))


def _decoding(name: str) -> Table:
    """Count what one step of decoding takes, captured or not."""
    table = Table("a step", "captured", "kernels", "reads", "copies", "pinned", title=f"{name}: decoding")
    for prompt, kind in ((100, "own prompts"), (600, "shared prompts")):
        for adapters in range(3):
            with fake_gpu() as gpu:
                base = _base(gpu, name)
                held = [version(base, letter, _RANK) for letter in "ab"[:adapters]]
                _step(gpu, base, held or [PLAIN], prompt)
                graph = gpu.graphs[-1] if gpu.graphs else None
                kernels = sum((graph.kernels if graph else gpu.kernels).values())
                counts = [kernels, len(gpu.reads), len(gpu.writes), len(gpu.sent)]
                captured = "yes" if graph else "no"
                table.add_row(f"{kind}, adapters: {adapters}", captured, *map(str, counts))
    return table


def _step(gpu: FakeGpu, base: Base, held: list[HeldLora], prompt: int) -> None:
    """Do a step that is not the first; leave the counts of it alone, with the graph that it replays."""
    batch = batch_of(base, cache=8 << 30)
    for version_ in held:
        batch.join(call(version_, [4, 4], prompt, _STEPS))
    batch.run(0.0)
    for _ in range(2):
        graphs = [*gpu.graphs]
        gpu.forget()
        gpu.graphs.extend(graphs)
        batch._make_room()
        batch._step()


def _training(name: str) -> Table:
    """Count what the gradients of one micro-batch take."""
    table = Table(
        "a micro-batch",
        *("tokens", "kernels", "reads", "copies", "pinned", "MB a token"),
        title=f"{name}: training",
    )
    for recompute in (False, True):
        with fake_gpu(grad=True) as gpu:
            base = _base(gpu, name)
            slot = slot_of(base, _RANK)
            work = work_of(base, 2, 120, 384, ragged=40)
            gpu.forget()
            before = gpu.bytes
            pieces = gradients(base, slot, work, recompute=recompute)
            tokens = sum(rows.ids.numel() for rows in pieces)
            bytes_ = (gpu.peak - before) / max(rows.ids.numel() for rows in pieces) / 1e6
            counts = [sum(gpu.kernels.values()), len(gpu.reads), len(gpu.writes), len(gpu.sent)]
            label = "recomputed" if recompute else "kept"
            table.add_row(label, f"{tokens:,}", *(f"{n / len(pieces):,.0f}" for n in counts), f"{bytes_:.2f}")
    return table


def _base(gpu: FakeGpu, name: str) -> Base:
    written = SIZES[name]
    gpu.fill = even_experts(gpu, written.get("num_experts", 0))
    return base_of(written)


if __name__ == "__main__":
    main(*sys.argv[1:])
