"""The section `lora`: the adapter that a run trains."""

from typing import Annotated, Literal

import msgspec

from lorad.bounds import ALPHA
from lorad.spec.numbers import Part, Positive, Probability


class LoraExperts(Part, frozen=True):
    """The adapter on the experts of a mixture: every linear of every expert has an A and a B of its own.

    Attributes:
        rank: rank of A and B on linears of experts; auto is lora.rank divided by the experts that a token
            meets, at least 1. Their scale is lora.alpha divided by this rank.
    """

    rank: Positive | Literal["auto"] = "auto"


class Lora(Part, frozen=True):
    """The adapter. Its scale is alpha / rank, or alpha / sqrt(rank) with `rslora` (Kalajdzievski, 2023).

    Attributes:
        rank: rank of A and B.
        alpha: numerator of the scale.
        dropout: probability with which an input of A is dropped in training.
        target_modules: `all-linear`, or names in Hugging Face's or Megatron's words, as a list or with
            commas; wildcards with `*` are allowed.
        exclude_modules: names that are left out of the targets, written in the same way.
        init: how A starts; B starts at zero.
        rslora: true scales by alpha / sqrt(rank).
        dora: true gives each row of W + scale * B A a length of its own that is trained besides (DoRA: Liu et
            al., 2024); with trainer.backend builtin or fsdp, sampled by the builtin engine.
        type: Megatron's word for who has an A. With `lora` q, k and v share one, and gate and up; with
            `canonical_lora` each linear has its own. Where linears are not fused (builtin, fsdp) both mean
            the latter.
        adapter_path: a PEFT directory that the run starts from. What is left out of rank, alpha, dropout,
            target_modules, exclude_modules, rslora, dora and experts.rank is then as the adapter has it.
        experts: the adapter on the experts of a mixture, where target_modules names them.
    """

    rank: Positive = 16
    alpha: Annotated[float, msgspec.Meta(gt=0, le=ALPHA)] = 32
    dropout: Probability = 0.0
    target_modules: str | list[str] = "all-linear"
    exclude_modules: str | list[str] = msgspec.field(default_factory=lambda: ["lm_head"])
    init: Literal["kaiming", "xavier", "normal", "zero"] = "kaiming"
    rslora: bool = False
    dora: bool = False
    type: Literal["lora", "canonical_lora"] = "canonical_lora"
    adapter_path: str | None = None
    experts: LoraExperts = LoraExperts()

    @property
    def max_rank(self) -> int:
        """Return the highest rank that a module of the adapter may have."""
        return self.rank if self.experts.rank == "auto" else max(self.rank, self.experts.rank)

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
