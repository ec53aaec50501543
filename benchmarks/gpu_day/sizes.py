"""How large everything is: the models, the batches, and which size a device can take. Imports no torch."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from lorad.daemon.gpu.devices import Device

GIB = 1 << 30
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Size:
    """What is made and measured.

    model, experts: numbers of `config.json`, of a Qwen3 and of a Qwen3-MoE.
    rows: of the rollouts, each a multiple of eight or less than that.
    shared: tokens of a prompt whose samples share its keys and values.
    contexts: rows, and the tokens that each attends to, for which attention alone is measured.
    groups, completion: of a training batch, which has eight samples to a prompt.
    microbatches: tokens of one, and whether activations are recomputed.
    steps, prompts: of the run, whose completions have `run_tokens`.
    device_gib, host_gib: what the device and the folder of the models must have.
    """

    name: str
    model: Mapping[str, int]
    experts: Mapping[str, int]
    rank: int
    expert_rank: int
    rows: tuple[int, ...]
    contexts: tuple[tuple[int, int], ...]
    prompt: int
    shared: int
    tokens: int
    cache_gib: float
    groups: int
    completion: int
    microbatches: tuple[tuple[int, bool], ...]
    steps: int
    prompts: int
    run_tokens: int
    device_gib: float
    host_gib: float


def _dense(hidden: int, inner: int, layers: int, heads: int, vocab: int = 151936) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": vocab,
    }


def _mixture(layers: int, count: int) -> dict[str, int]:
    """Return layers as Qwen3-30B-A3B has them."""
    more = {"num_experts": count, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    return _dense(2048, 6144, layers, 32, 32768) | more | {"num_key_value_heads": 4}


_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}

SIZES = {
    size.name: size
    for size in (
        Size(
            name="8b",
            model=_dense(4096, 12288, 36, 32),
            experts=_mixture(4, 128),
            rank=32,
            expert_rank=8,
            rows=(8, 32, 128, 256),
            contexts=((1, 32768), (8, 8192), (64, 4096), (256, 512)),
            prompt=120,
            shared=1024,
            tokens=128,
            cache_gib=16,
            groups=16,
            completion=384,
            microbatches=((4096, False), (16384, True), (16384, False)),
            steps=6,
            prompts=16,
            run_tokens=128,
            device_gib=70,
            host_gib=30,
        ),
        Size(
            name="1b",
            model=_dense(2048, 6144, 28, 16),
            experts=_mixture(2, 32),
            rank=32,
            expert_rank=8,
            rows=(8, 32, 128),
            contexts=((1, 32768), (8, 8192), (64, 1024)),
            prompt=120,
            shared=1024,
            tokens=128,
            cache_gib=4,
            groups=8,
            completion=384,
            microbatches=((4096, False), (16384, True), (16384, False)),
            steps=6,
            prompts=8,
            run_tokens=128,
            device_gib=14,
            host_gib=8,
        ),
        Size(
            name="micro",
            model=_SMALL,
            experts=_SMALL | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
            rank=4,
            expert_rank=4,
            rows=(2, 8),
            contexts=((2, 64),),
            prompt=16,
            shared=320,
            tokens=8,
            cache_gib=0.25,
            groups=2,
            completion=8,
            microbatches=((64, False), (256, True)),
            steps=10,
            prompts=2,
            run_tokens=8,
            device_gib=0,
            host_gib=0,
        ),
    )
}


def pick(device: Device, room: int) -> Size:
    """Choose the largest size that a device and a folder with `room` bytes take; on a CPU the smallest."""
    memory = 0 if device.is_cpu else device.memory_total
    fits = (
        size for size in SIZES.values() if size.device_gib * GIB <= memory and size.host_gib * GIB <= room
    )
    return next(fits)


def place_for_models() -> tuple[Path, int]:
    """Return a folder for models and the bytes that are free there: in memory, where they are read fastest,
    unless the one for temporary files has room for larger ones.
    """
    disk = Path(tempfile.gettempdir())
    rooms = {disk: shutil.disk_usage(disk).free}
    if MEMORY.is_dir():
        rooms[MEMORY] = min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available)
    enough = max(size.host_gib for size in SIZES.values()) * GIB
    if rooms.get(MEMORY, 0) >= enough:
        return MEMORY, rooms[MEMORY]
    return max(rooms.items(), key=lambda item: item[1])
