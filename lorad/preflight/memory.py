"""Memory that this process could still get, and the refusal of what needs more."""

from pathlib import Path

import psutil

from lorad.errors import SpecError
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


def check_memory(parts: dict[str, int], free: int | None, device: str, fraction: float) -> None:
    """parts: bytes by what takes them. Raises SpecError when they are more than may be taken."""
    needed = sum(parts.values())
    if free is not None and needed > free * fraction:
        of = ", ".join(f"{name} {in_units(size)}" for name, size in parts.items())
        raise SpecError(
            f"the pool needs {in_units(needed)} on {device}, {in_units(free)} are free, of "
            f"which it may take {fraction:.0%} (pool.memory_fraction): {of}",
            key="model.path",
            hint="Free some memory, use model.dtype: bfloat16, a smaller lora.rank (and lora.experts.rank), "
            "fewer data.prompts_per_step or trainer.tokens_per_microbatch, or a smaller model.",
        )
