"""An adapter as plain fp32 arrays under logical Hugging Face names: what trainers export and engines load.

Names are `model.layers.0.self_attn.q_proj.lora_A.weight` (shape [rank, in]) and `….lora_B.weight` ([out, rank]),
without PEFT's `base_model.model.` prefix, whatever backend trained them.
"""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Mapping

import numpy as np
from msgspec import Struct
from safetensors.numpy import save

PEFT_PREFIX = "base_model.model."


class AdapterConfig(Struct, frozen=True):
    """What a set of tensors needs to be applied: y += scale * B(A(x)) on each module of `modules`.

    modules: logical names, sorted. scale: alpha / rank, or alpha / sqrt(rank) with rslora.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]
    rslora: bool = False
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class Adapter(Struct, frozen=True):
    """An immutable snapshot: nothing may write to `tensors` (fp32, C-contiguous) once it is made."""

    config: AdapterConfig
    tensors: Mapping[str, np.ndarray]

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def serialized(self) -> builtins.bytes:
        """The bytes of `adapter_model.safetensors`, keys with PEFT's prefix: equal tensors give equal bytes."""
        tensors = {PEFT_PREFIX + name: self.tensors[name] for name in sorted(self.tensors)}
        return save(tensors, metadata={"format": "pt"})

    def digest(self) -> str:
        """sha256 (hex) of `serialized()`: what `sha256sum adapter_model.safetensors` prints."""
        return hashlib.sha256(self.serialized()).hexdigest()
