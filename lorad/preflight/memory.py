"""Memory that this process could still get, and what the bases of a run take."""

from collections.abc import Iterable
from pathlib import Path

import psutil

from lorad.adapters.targets import experts_of, leaf
from lorad.backends.registry import RANKED, SERVERS
from lorad.backends.setup import max_rank, served_experts
from lorad.errors import SpecError
from lorad.models.directory import BYTES
from lorad.models.facts import ModelFacts
from lorad.protocol.pool_setup import SERVER_SLOTS
from lorad.spec.model import Spec
from lorad.text import size as in_units

_CGROUP = Path("/sys/fs/cgroup")


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes: what the kernel says is available, or what the control group still allows when that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        lines = (cgroup / "memory.stat").read_text().splitlines()
        cache = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError):  # no control group, or "max"
        return free
    return min(free, max(0, limit - used + cache))


def base_memory(
    spec: Spec, model: ModelFacts, device: str, modules: Iterable[str], teacher: ModelFacts | None = None
) -> int:
    """Return the bytes of the bases that are loaded, `auto` being float32 on the CPU: the trainer's, each
    server's own, with room for adapters on experts if there are any among `modules`, and the teacher's, in
    the dtype of the model.

    FSDP cuts one over all ranks, Megatron has one for each data-parallel copy. On GPUs trainers of ranks move
    theirs away while a server is awake, which sleeps while they train: there the larger side counts.
    """
    trainer, rollout = spec.trainer, spec.rollout
    trained = trainer.dp if trainer.backend == "megatron" else 1
    sampled = 0 if rollout.urls else rollout.servers
    if rollout.backend not in SERVERS:  # a base in the pool's process, which a trainer there shares
        sampled = int(trainer.backend in RANKED)
    dtype = "float32" if spec.model.dtype == "auto" and device == "cpu" else spec.model.dtype
    beside = 0 if teacher is None else teacher.bytes(model.dtype if dtype == "auto" else dtype)
    room = _expert_buffers(spec, model, modules, dtype)
    held = model.bytes(dtype, spec.model.quantize)
    training, sampling = held * trained, held * sampled + room
    sleeps = device != "cpu" and rollout.backend in SERVERS and not rollout.urls
    takes_turns = sleeps and trainer.backend in RANKED and spec.pool.mode in ("auto", "timesliced")
    return (max(training, sampling) if takes_turns else training + sampling) + beside


def _expert_buffers(spec: Spec, model: ModelFacts, modules: Iterable[str], dtype: str) -> int:
    """Return the bytes that servers set aside for adapters on experts: in each slot for every expert, at the
    highest rank, whichever of them the run adapts. Those for other linears are small beside the base.

    SGLang (0.5.23, `lora/mem_pool.py`) does so too where linears beside the experts are adapted that have
    the names of theirs, as those of a shared MLP.
    """
    rollout, modules = spec.rollout, [*modules]
    if rollout.backend not in SERVERS or rollout.urls:
        return 0
    experts = served_experts(rollout.backend, model) if any(map(experts_of, modules)) else {}
    if rollout.backend == "sglang" and {*map(leaf, modules)} & {*map(leaf, model.experts)}:
        experts = model.experts
    numbers = max_rank(spec.lora) * sum(map(sum, experts.values()))
    return rollout.servers * SERVER_SLOTS * numbers * BYTES[model.dtype if dtype == "auto" else dtype]


def check_memory(needed: int, free: int | None, device: str, fraction: float) -> None:
    if free is not None and needed > free * fraction:
        raise SpecError(
            f"base and adapter need {in_units(needed)} on {device}, {in_units(free)} are free, of "
            f"which a pool may take {fraction:.0%} (pool.memory_fraction)",
            key="model.path",
            hint="Free some memory, use model.dtype: bfloat16, a smaller lora.rank (and lora.experts.rank), "
            "or a smaller model.",
        )
