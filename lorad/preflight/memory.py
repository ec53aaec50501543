"""The refusal of what needs more memory than there is."""

from lorad.errors import SpecError
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
