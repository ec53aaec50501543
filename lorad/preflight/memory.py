"""The refusal of what needs more memory than there is."""

from collections.abc import Iterable, Mapping

from lorad.errors import SpecError
from lorad.preflight.pool_memory import MemorySide
from lorad.text import size as in_units


def check_memory(
    parts: Mapping[str, int], sides: Iterable[MemorySide], free: int | None, device: str, fraction: float
) -> None:
    """Refuse what needs more memory than there is.

    parts: bytes by what takes them, of a CPU's machine.
    sides: what is on the GPUs.
    free: bytes that are free on a CPU, or that each GPU has; None where that is not known.

    Raises SpecError.
    """
    if free is None:
        return
    if device != "cpu":
        for side in sides:
            needed = sum(side.parts.values())
            if needed <= side.gpus * free * fraction:
                continue
            of = ", ".join(f"{name} {in_units(part)}" for name, part in side.parts.items() if part)
            count = f"{side.gpus} GPUs of {in_units(free)} each"
            count = count if side.gpus > 1 else f"a GPU of {in_units(free)}"
            raise SpecError(
                f"{side.who} would need {in_units(needed)} of {count}, of which {fraction:.0%} may be taken "
                f"(pool.memory_fraction): {of}",
                key="model.path",
                hint="Give it more GPUs (trainer.dp, resources.devices, resources.rollout_devices), lower "
                "trainer.tokens_per_microbatch or lora.rank, or take a smaller model.",
            )
        return
    if (needed := sum(parts.values())) > free * fraction:
        of = ", ".join(f"{name} {in_units(size)}" for name, size in parts.items())
        raise SpecError(
            f"the pool needs {in_units(needed)} on {device}, {in_units(free)} are free, of "
            f"which it may take {fraction:.0%} (pool.memory_fraction): {of}",
            key="model.path",
            hint="Free some memory, use model.dtype: bfloat16, a smaller lora.rank (and lora.experts.rank), "
            "fewer data.prompts_per_step or trainer.tokens_per_microbatch, or a smaller model.",
        )
