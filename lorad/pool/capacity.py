"""How much room a pool has for more runs, and how trainer and engine share the memory of a device."""

from pathlib import Path
from typing import Literal, Protocol

import psutil
import torch

from lorad.backends.activations import ADAPTERS, CPU_CACHE
from lorad.box.machine import NO_LIMIT, read_machine
from lorad.errors import SpecError
from lorad.models.facts import ModelFacts, read_facts
from lorad.protocol.pool_setup import PoolSetup

_LEAST_CACHE = 256 << 20  # bytes for keys and values; they have half of what the base leaves of a GPU
# what the trainer keeps while it does not train, in sizes of its base: adapters and Adam states
_TRAINER_SHARE = 1.2
_LODGER_SHARE = 0.2  # the same of a trainer whose base is moved away meanwhile
_LEAST_FRACTION = 0.1  # of a device: less is no room for any server


def memory_for_adapters(config: PoolSetup) -> int:
    """Return the bytes that slots and versions may take once both sides have started; 0 where that is not
    known.

    On a CPU it is what the pool's share of the machine leaves beside the processes and the cache of an engine
    in the pool, which a small machine never fills. On a GPU it is known where one base serves both sides.
    """
    if config.device == "cpu":
        granted = read_machine().memory
        if granted >= NO_LIMIT:
            return 0
        pool = psutil.Process()
        taken = sum(process.memory_info().rss for process in (pool, *pool.children(recursive=True)))
        cache = CPU_CACHE if config.server is None else 0
        left = int(granted * config.memory_fraction) - taken
        return max(1, left // ADAPTERS, left - cache)
    if config.has_ranks or config.server is not None:
        return 0
    return max(0, memory_left(config, read_facts(Path(config.model_path)))) // ADAPTERS


def memory_left(config: PoolSetup, facts: ModelFacts) -> int:
    """Return the bytes that the trainer's bases leave of a GPU; less than 0 where they do not fit."""
    bases = trainer_bytes(config, facts) + _teacher_bytes(config, facts)
    return int(_total(config) * config.memory_fraction) - bases


def dtype_of(config: PoolSetup, facts: ModelFacts) -> Literal["float32", "bfloat16"]:
    """Return the dtype of the base. `auto` is float32 on a CPU, whose bfloat16 is slow, else the checkpoint's
    own (float16 becomes bfloat16).
    """
    dtype: str = config.dtype
    if dtype == "auto":
        dtype = "float32" if config.device == "cpu" else facts.dtype
    return "float32" if dtype == "float32" else "bfloat16"


def trainer_bytes(config: PoolSetup, facts: ModelFacts) -> int:
    """Return the bytes of the base on each of the trainer's devices: FSDP shards it over all ranks, Megatron
    over tp and pp.
    """
    ranks = config.ranks
    dtype = dtype_of(config, facts)
    if ranks is None:
        return facts.bytes(dtype, config.quantize)
    whole = facts.bytes(dtype)  # ranks hold rounded numbers as dense ones
    return -(-whole // (ranks.tp * ranks.pp if config.trainer == "megatron" else ranks.ranks))


def _teacher_bytes(config: PoolSetup, facts: ModelFacts) -> int:
    """Return the bytes of the teacher, which has the dtype of the base that `facts` describe."""
    path = config.teacher_path
    return read_facts(Path(path)).bytes(dtype_of(config, facts)) if path else 0


class _LoadedBase(Protocol):
    """A base on a device, whoever computes it."""

    @property
    def device(self) -> torch.device: ...

    def nbytes(self) -> int: ...


def engine_cache(config: PoolSetup, facts: ModelFacts, base: _LoadedBase, *, own: bool) -> int:
    """Return the bytes for keys and values of an engine in the pool's process; with `own` the trainer's base
    is beside the engine's.

    They are the same on each start, since samples that outgrow the cache are computed again, which is not bit
    for bit the same.
    """
    if base.device.type == "cpu":
        return CPU_CACHE
    beside = int(_TRAINER_SHARE * trainer_bytes(config, facts)) if own else 0
    beside += _teacher_bytes(config, facts)
    left = int(_total(config) * config.memory_fraction) - base.nbytes() - beside
    return max(_LEAST_CACHE, left // 2)  # the other half is for training


def server_share(config: PoolSetup, facts: ModelFacts) -> float:
    """Return the fraction of each device's memory for all servers on it: what an idle trainer leaves free, or
    half.

    Raises SpecError when that leaves no room.
    """
    if config.device == "cpu" or config.mode == "split":
        return config.memory_fraction
    if config.nodes is not None:  # how much memory there is on nodes is not known here
        return config.memory_fraction / 2
    fraction = config.memory_fraction - _teacher_bytes(config, facts) / _total(config)
    share = fraction / 2
    if config.mode == "timesliced":
        kept = _LODGER_SHARE if config.ranks is not None else _TRAINER_SHARE
        share = fraction - kept * trainer_bytes(config, facts) / _total(config)
    if share < _LEAST_FRACTION:
        raise SpecError(
            f"{config.device}: {config.model} twice, for trainer and engine, does not fit",
            hint="Use rollout.backend: builtin, which shares one copy, or raise pool.memory_fraction.",
        )
    return share


def _total(config: PoolSetup) -> int:
    """Return the bytes of the device."""
    return int(torch.cuda.get_device_properties(torch.device(config.device)).total_memory)
