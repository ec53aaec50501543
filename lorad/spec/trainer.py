"""The section `trainer`: who trains, and its optimizer."""

from typing import Any, Literal

import msgspec

from lorad.spec.numbers import NonNegative, NonNegativeFloat, Part, Positive, PositiveFloat, Probability


class Trainer(Part, frozen=True):
    """The trainer and its optimizer, AdamW (Loshchilov & Hutter, 2019).

    Attributes:
        backend: `builtin`, `fsdp`, `megatron`, or a name of config.yaml.
        lr: learning rate; null chooses one for the size of the model, its family and the algorithm when the
            run is made.
        loraplus_lr_ratio: learning rate of B divided by that of A, which is lr (LoRA+: Hayou et al., 2024); 1
            is plain LoRA.
        schedule: how the learning rate falls after the warm-up.
        schedule_steps: horizon of linear and cosine, in steps; null is the `steps` of the first attempt.
        warmup_steps: steps over which the learning rate rises to lr.
        min_lr: learning rate where linear and cosine end.
        steps: steps of the run.
        betas: decay rates of Adam's two moments.
        eps: Adam's epsilon.
        weight_decay: decoupled weight decay.
        max_grad_norm: norm to which gradients are clipped; 0 does not clip.
        max_skipped_steps: steps in a row whose loss or gradient is not finite, after which the run ends.
        tokens_per_microbatch: tokens of one forward and backward pass; `auto` is 16384, or what the device's
            memory allows.
        activation_checkpointing: recompute activations in the backward pass, for less memory and more time;
            `auto` does it where samples would not fit without, and on a GPU where few tokens would.
        tp: tensor-parallel ranks (megatron).
        pp: pipeline-parallel ranks (megatron).
        dp: data-parallel ranks (fsdp, megatron).
        cp: context-parallel ranks, which cut each sequence (fsdp): a long one takes less memory on each.
        ep: spreads experts over ranks that are there already (megatron).
        backend_args: settings of the backend itself, for those that have ranks (fsdp, megatron).
    """

    backend: str = "builtin"
    lr: NonNegativeFloat | None = None
    loraplus_lr_ratio: PositiveFloat = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    schedule_steps: Positive | None = None
    warmup_steps: NonNegative = 0
    min_lr: NonNegativeFloat = 0.0
    steps: Positive = 60
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: NonNegativeFloat = 1.0
    max_skipped_steps: Positive = 3
    tokens_per_microbatch: Positive | Literal["auto"] = "auto"
    activation_checkpointing: bool | Literal["auto"] = "auto"
    tp: Positive = 1
    pp: Positive = 1
    dp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    backend_args: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp
