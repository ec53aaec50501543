"""Which rotary position embedding a `config.json` asks for; any other is refused by name.

Imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorad.errors import SpecError

_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """A rotary embedding under Hugging Face's field names; what a type does not use keeps its default.

    Attributes:
        rope_type: One of `_ROPE_TYPES`. dynamic is default up to `max_position_embeddings`, and lorad never
            goes beyond.
        attention_factor: The factor of cos and sin.
        partial_rotary_factor: The part of a head, from its first number on, that is rotated.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    partial_rotary_factor: float = 1.0


def parse_rope(
    data: Mapping[str, Any], max_positions: int, where: str, *, may_be_partial: bool = False
) -> RopeParameters:
    """Read `rope_parameters`, or the older `rope_scaling` beside `rope_theta`; the precedence is that of
    transformers.

    Raises: SpecError for a type that is not in `_ROPE_TYPES`, an embedding that differs by layer or, unless
    it may be partial, covers a part of the head, and a field that is missing or no positive number.
    """
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    if isinstance(rope, Mapping) and set(rope) == {"full_attention"}:  # newer configs: by the type of layer
        rope = rope["full_attention"] or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise _refused("a rotary embedding that differs by layer", where)
    rope_type = str(rope.get("rope_type") or rope.get("type") or "default")
    partial = rope.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    if rope_type not in _ROPE_TYPES:
        raise _refused(f"rope type {rope_type}", where)
    if partial is None:
        partial = 1
    if partial != 1 and not (may_be_partial and 0 < partial < 1):
        raise _refused(f"partial_rotary_factor {partial}", where)
    fields: dict[str, Any] = {"rope_theta": rope.get("rope_theta") or data.get("rope_theta") or 10000.0}
    if rope_type in ("linear", "llama3", "yarn"):
        fields["factor"] = rope.get("factor")
    if rope_type in ("llama3", "yarn"):
        original = "original_max_position_embeddings"
        trained = fields[original] = data.get(original) or rope.get(original) or max_positions
        if rope_type == "llama3":
            fields |= {key: rope.get(key) for key in ("low_freq_factor", "high_freq_factor")}
        else:
            fields |= {"beta_fast": rope.get("beta_fast") or 32.0, "beta_slow": rope.get("beta_slow") or 1.0}
            fields["factor"] = max_positions / trained if fields["factor"] is None else fields["factor"]
    checked: dict[str, Any] = {key: positive(key, value, where) for key, value in fields.items()}
    if rope_type == "yarn":
        checked["truncate"] = bool(rope.get("truncate", True))
        checked["attention_factor"] = _attention_factor(rope, checked["factor"], where)
    return RopeParameters(rope_type, **checked, partial_rotary_factor=float(partial))


def _attention_factor(rope: Mapping[str, Any], factor: float, where: str) -> float:
    """Return 0.1 ln(factor) + 1 as YaRN (arXiv 2309.00071, section 3.4) has it, with DeepSeek's mscale and
    mscale_all_dim.
    """
    explicit, mscale, everywhere = (rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if explicit is not None:
        return positive("attention_factor", explicit, where)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if not (mscale and everywhere):
        return scale(1.0)
    return scale(positive("mscale", mscale, where)) / scale(positive("mscale_all_dim", everywhere, where))


def positive(key: str, value: Any, where: str) -> float:
    """Return a number of `config.json`. Raises SpecError unless it is positive."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SpecError(
            f"{where}: {key} is {value!r}, not a positive number", hint="download the model again"
        )
    return float(value)


def _refused(option: str, where: str) -> SpecError:
    return SpecError(
        f"{where}: the builtin backend does not compute {option}",
        hint=f"supported: one rope type for the whole head and every layer, of {', '.join(_ROPE_TYPES)}",
    )
