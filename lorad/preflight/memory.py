"""The refusal of what needs more memory than there is."""

from collections.abc import Iterable

from lorad.errors import SpecError
from lorad.preflight.pool_memory import MemorySide
from lorad.text import size as in_units


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


def check_gpus(sides: Iterable[MemorySide], each: int, fraction: float) -> None:
    """Refuse what does not fit on its GPUs. each: bytes of one GPU. Raises SpecError."""
    for side in sides:
        needed = sum(side.parts.values())
        if needed <= side.gpus * each * fraction:
            continue
        of = ", ".join(f"{name} {in_units(size)}" for name, size in side.parts.items() if size)
        count = (
            f"{side.gpus} GPUs of {in_units(each)} each" if side.gpus > 1 else f"a GPU of {in_units(each)}"
        )
        raise SpecError(
            f"{side.who} would need {in_units(needed)} of {count}, of which {fraction:.0%} may be taken "
            f"(pool.memory_fraction): {of}",
            key="model.path",
            hint="Give it more GPUs (trainer.dp, resources.devices, resources.rollout_devices), lower "
            "trainer.tokens_per_microbatch or lora.rank, or take a smaller model.",
        )
