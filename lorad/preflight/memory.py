"""Memory that this process could still get, and what the bases of a run take."""

from pathlib import Path

import psutil

from lorad.backends.registry import RANKED, SERVERS
from lorad.errors import SpecError
from lorad.models.facts import ModelFacts
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


def base_memory(spec: Spec, model: ModelFacts, device: str, teacher: ModelFacts | None = None) -> int:
    """Return the bytes of the bases that are loaded, `auto` being float32 on the CPU: the trainer's, each
    server's own, and the teacher's, in the dtype of the model.

    FSDP cuts one over all ranks, Megatron has one for each data-parallel copy.
    """
    trainer, rollout = spec.trainer, spec.rollout
    trained = trainer.dp if trainer.backend == "megatron" else 1
    sampled = 0 if rollout.urls else rollout.servers
    if rollout.backend not in SERVERS:  # a base in the pool's process, which a trainer there shares
        sampled = int(trainer.backend in RANKED)
    dtype = "float32" if spec.model.dtype == "auto" and device == "cpu" else spec.model.dtype
    beside = 0 if teacher is None else teacher.bytes(model.dtype if dtype == "auto" else dtype)
    return model.bytes(dtype) * (trained + sampled) + beside


def check_memory(needed: int, free: int | None, device: str, fraction: float) -> None:
    if free is not None and needed > free * fraction:
        raise SpecError(
            f"base and adapter need {in_units(needed)} on {device}, {in_units(free)} are free, of "
            f"which a pool may take {fraction:.0%} (pool.memory_fraction)",
            key="model.path",
            hint="Free some memory, use model.dtype: bfloat16, a smaller lora.rank, or a smaller model.",
        )
