"""An adapter as plain fp32 arrays under logical Hugging Face names: trainers export it and engines load it.

Names are `model.layers.0.self_attn.q_proj.lora_A.weight` (shape [rank, in]) and `….lora_B.weight` ([out,
rank]), with DoRA also `….lora_magnitude_vector` ([out]), without PEFT's prefix `base_model.model.`.
"""

import builtins
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from lorad.adapters.targets import Named, experts_of
from lorad.adapters.tensors import serialized

T = TypeVar("T")

PEFT_PREFIX = "base_model.model."
MAGNITUDE = "lora_magnitude_vector"  # the last part of the name of DoRA's magnitude


class AdapterConfig(Struct, frozen=True):
    """How a set of tensors is applied: y += scale * B(A(x)) on each module of `modules`.

    The scale is alpha / rank, or alpha / sqrt(rank) with rslora. With `dora` each module also has a magnitude
    m of its output rows (Liu et al., 2024, arXiv 2402.09353): the weight W of the base becomes
    m * (W + scale B A) / |W + scale B A|, with norms over each row.

    Attributes:
        modules: The logical names, sorted.
        expert_rank: The rank on linears of experts, also in their scale (as with PEFT's rank_pattern and
            Megatron-Bridge's normalize_moe_lora); None where it is `rank`, or no expert is adapted.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]
    rslora: bool = False
    dropout: float = 0.0
    expert_rank: int | None = None
    dora: bool = False

    def __post_init__(self) -> None:
        if self.expert_rank is not None and (self.expert_rank == self.rank or not self.experts):
            force_setattr(self, "expert_rank", None)

    @property
    def scale(self) -> float:
        """Return the scale on all modules but those of experts."""
        return self._scale(self.rank)

    @property
    def experts(self) -> tuple[str, ...]:
        """Return the modules that are linears of experts."""
        return tuple(module for module in self.modules if experts_of(module))

    @property
    def rank_of_experts(self) -> int:
        return self.rank if self.expert_rank is None else self.expert_rank

    @property
    def max_rank(self) -> int:
        """Return the highest rank that any module has."""
        if self.expert_rank is None:
            return self.rank
        return max(self.expert_rank, self.rank if len(self.experts) < len(self.modules) else 0)

    @property
    def scale_of_experts(self) -> float:
        return self._scale(self.rank_of_experts)

    def rank_of(self, module: str) -> int:
        return self.rank_of_experts if experts_of(module) else self.rank

    def scale_of(self, module: str) -> float:
        return self._scale(self.rank_of(module))

    def _scale(self, rank: int) -> float:
        return self.alpha / (rank**0.5 if self.rslora else rank)


class Fused(NamedTuple):
    """A pair of a PEFT file that is on all experts of a layer, see `fused.py`."""

    module: str  # its name in the file
    experts: str  # the module of the experts
    linears: tuple[str, ...]  # of each expert that it is on
    total: int  # the number of experts
    rank: int  # of each expert's pairs
    owns: bool  # whether gate and up have an A each

    def name(self, expert: int, linear: str) -> str:
        """Return the logical name of an expert's linear."""
        return f"{self.experts}.{expert}.{linear}"


class Outline(NamedTuple):
    """An adapter by its PEFT directory, without reading more of the weights than their header."""

    config: AdapterConfig
    shapes: dict[str, tuple[int, ...]]  # of its tensors, by logical name
    copies: tuple[str, ...] = ()  # modules whose weight in the base is in the file too, as of lm_head
    fused: tuple[Fused, ...] = ()  # the pairs on all experts of a layer, whose parts are among `shapes`
    named: Named = Named(None, None)  # the modules that its configuration names


class Adapter(Struct, frozen=True, dict=True):
    """An immutable snapshot, whose `tensors` (fp32, C-contiguous; narrower in served.py) are not written to.

    Passes over all numbers are made once, unless some array could still be written to.
    """

    config: AdapterConfig
    tensors: Mapping[str, np.ndarray]

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def is_known(self) -> bool:
        """Return whether `digest` and `is_finite` are computed already."""
        return {"_sha256", "_finite"} <= self.__dict__.keys()

    def amplified(self, times: float) -> "Adapter":
        """Return the same tensors with a multiple of alpha, and all that was computed of them."""
        copy = Adapter(replace(self.config, alpha=times * self.config.alpha), self.tensors)
        copy.__dict__.update(self.__dict__)
        return copy

    def parts(self) -> list[builtins.bytes | memoryview]:
        """Return `adapter_model.safetensors` with PEFT's prefix, in order: equal tensors give equal bytes."""
        return serialized({PEFT_PREFIX + name: tensor for name, tensor in self.tensors.items()})

    def digest(self) -> str:
        """Return the sha256 (hex) of `parts()`, as `sha256sum adapter_model.safetensors` prints it."""

        def hashed() -> str:
            whole = hashlib.sha256()
            for part in self.parts():
                whole.update(part)
            return whole.hexdigest()

        return self._once("_sha256", hashed)

    def is_finite(self) -> bool:
        """Return whether no number is NaN or infinite."""
        return self._once("_finite", lambda: all(bool(np.isfinite(t).all()) for t in self.tensors.values()))

    def norm(self) -> float:
        """Return the Frobenius norm of scale * B A over all modules, by products of rank x rank."""

        def measured() -> float:
            total = 0.0
            for module in self.config.modules:
                a, b = (self.tensors[f"{module}.lora_{letter}.weight"].astype(np.float64) for letter in "AB")
                inner = (b.T @ b) * (a @ a.T)
                total += self.config.scale_of(module) ** 2 * float(inner.sum())
            return math.sqrt(max(total, 0.0))

        return self._once("_norm", measured)

    def _once(self, what: str, compute: Callable[[], T]) -> T:
        if any(tensor.flags.writeable for tensor in self.tensors.values()):
            return compute()
        if what not in self.__dict__:
            self.__dict__[what] = compute()
        value: T = self.__dict__[what]
        return value
