"""The trainer protocol: log-probabilities, gradients and optimizer steps for adapters on one frozen base.

An adapter lives in a *slot* (weights, gradients, Adam state, dropout RNG). Slots do not touch each other.
A slot may be a critic: an adapter with a head of one output on the last hidden state, which gives values
where another slot gives log-probabilities.
State is keyed by logical Hugging Face names, whatever the backend's sharding. Rules that every trainer keeps,
checked by `tests/conformance/trainer_suite.py`:

- Only adapter parameters change; the base's checksum is the same at the end.
- forward_backward accumulates: two calls with halves of a batch have the gradients of one with all of it.
- `save` then `load` in a fresh process continues bit for bit (deterministic backends) with the same calls.
- An adapter that matches no module and a state with other keys are refused; nothing silently begins anew.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.errors import NotFound
from lorad.protocol.batch import (
    LABELS,
    LOSSES,
    Batch,
    Gradients,
    LossStats,
    Optimizer,
    PolicyLoss,
    PolicyTargets,
    Predictions,
    ValueLoss,
    ValueTargets,
)
from lorad.protocol.calls import ForwardBackward, OptimStep, StepResult, TrainerVerb, ValueBackward, Values
from lorad.routes import RouteShape

T = TypeVar("T")

LoraType = Literal["lora", "canonical_lora"]


class TrainerCapabilities(Struct, frozen=True):
    """What a trainer can do; a pool asks for nothing else.

    Attributes:
        losses: The terms of `PolicyLoss.needs` that it knows, `GIVEN_RATIO`, `LABELS`, and `VALUE_LOSS` where
            it has critics.
        routes: The shape of the base's routes, where the trainer replays them.
    """

    dtype: str  # of the base's arithmetic; adapters, gradients and Adam are fp32
    max_tokens: int  # prompt and completion together
    vocab: int  # token ids are 0 to vocab - 1
    deterministic: bool  # the same calls give the same bits, with the same number of threads
    offload: bool
    parameters: int = 0  # of the base; 0: unknown
    losses: tuple[str, ...] = LOSSES
    routes: RouteShape | None = None


class SlotSpec(Struct, frozen=True):
    """How a slot begins.

    Attributes:
        lora_type: `canonical_lora` gives every linear an A of its own; `lora` is Megatron's, where q, k and v
            share one, and gate and up. Trainers without fused linears have the first in either case.
        init: How A begins; B is zero.
        source: A PEFT directory whose tensors replace the init.
        kept_tokens: Micro-batches of at most so many tokens keep their activations also with
            `activation_checkpointing`; a trainer of several ranks recomputes in all of them.
        lent_tokens: Micro-batches have at most so many tokens, and recompute nothing, while the engine lends
            its memory; 0 where they are the same then.
        frozen: Whether it holds weights alone, a quarter of the memory. It then gives log-probabilities and
            can be exported; training, saving or loading it raises Conflict.
        critic: Whether it has a value head beside the adapter, fp32 and zero at the start, which is stepped,
            saved and loaded with it. It then has values and no policy.
    """

    adapter: AdapterConfig
    optimizer: Optimizer = Optimizer()
    lora_type: LoraType = "canonical_lora"
    init: str = "kaiming"
    seed: int = 0
    source: Path | None = None
    tokens_per_microbatch: int = 16384
    activation_checkpointing: bool = False
    kept_tokens: int = 0
    lent_tokens: int = 0
    frozen: bool = False
    critic: bool = False


class SlotInfo(Struct, frozen=True):
    """What a slot holds, a critic's head among it."""

    slot: str
    parameters: int
    tensors: int
    bytes: int  # weights, gradients and Adam state; of a frozen one, weights


class TrainerHealth(Struct, frozen=True):
    """Whether the trainer works, and how much memory it takes on all devices, if that is known."""

    alive: bool = True
    detail: str = ""
    memory: int | None = None  # bytes after the last call
    memory_peak: int | None = None  # the most bytes during the last call


class Policy(Struct, frozen=True):
    """Names whose log-probabilities are asked for: a slot's, with its present weights, or the base's."""

    slot: str | None = None  # None: the base without an adapter
    amplify: float = 1.0  # a factor of alpha, a power of two, which rounds nothing; the slot stays as is


class BaseChecksum(TrainerVerb[str], frozen=True, tag="base_checksum"): ...


class OpenSlot(TrainerVerb[SlotInfo], frozen=True, tag="open"):
    slot: str
    spec: SlotSpec


class DiscardGrads(TrainerVerb[None], frozen=True, tag="discard_grads"):
    slot: str


class Predict(TrainerVerb[Predictions], frozen=True, tag="predictions"):
    policy: Policy
    batch: Batch
    temperature: float = 1.0


class UnmetExperts(TrainerVerb[list[str] | None], frozen=True, tag="unmet_experts"):
    batch: Batch


class ExportSlot(TrainerVerb[Adapter], frozen=True, tag="export"):
    slot: str


class SaveSlot(TrainerVerb[list[str]], frozen=True, tag="save"):
    slot: str
    directory: Path


class LoadSlot(TrainerVerb[None], frozen=True, tag="load"):
    slot: str
    directory: Path


class Offload(TrainerVerb[None], frozen=True, tag="offload"): ...


class Onload(TrainerVerb[None], frozen=True, tag="onload"): ...


class CloseSlot(TrainerVerb[None], frozen=True, tag="close"):
    slot: str


class Trainer(ABC):
    """One trainer. All methods belong to one asyncio loop; calls on one slot come one after another.

    A trainer in this process overrides the methods. One that is elsewhere overrides `do`, which they call.
    """

    async def do(self, verb: TrainerVerb[T]) -> T:
        """Have a verb done where the trainer is. Raises what its method does."""
        raise NotImplementedError(f"{type(self).__name__} has no {type(verb).__name__}")

    @abstractmethod
    def capabilities(self) -> TrainerCapabilities: ...

    @abstractmethod
    def modules(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of every linear module that an adapter may target, by logical name."""

    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Return the names of the open slots."""

    async def base_checksum(self) -> str:
        """Return the sha256 (hex) over the base's weights as they are now."""
        return await self.do(BaseChecksum())

    async def open(self, slot: str, spec: SlotSpec) -> SlotInfo:
        """Make a slot. Raises Conflict when it exists, AdapterRefused when the spec does not fit the base."""
        return await self.do(OpenSlot(slot, spec))

    async def forward_backward(
        self, slot: str, batch: Batch, targets: PolicyTargets, loss: PolicyLoss, normaliser: float
    ) -> Gradients:
        """Add the gradient of sum(token losses) / normaliser to the slot's.

        The caller gives the normaliser of the whole (mini-)batch, see `lorad/rl/levels.py`. Split into
        micro-batches inside by `tokens_per_microbatch`, whose activations are recomputed in the backward with
        `activation_checkpointing`: less memory, more time, the same gradients. A trainer that finds no memory
        may do the call once more with micro-batches of half the tokens, and says so in `halved_to`. Raises
        NotFound and ValueError (see `check_work`) before anything is computed.
        """
        return await self.do(ForwardBackward(batch, targets, loss, normaliser, slot))

    async def forward_backward_many(self, work: Sequence[ForwardBackward]) -> list[Gradients]:
        """Do forward_backward for several slots, which may share passes.

        Each slot has the gradients, statistics and dropout of a call of its own, up to rounding. Raises
        NotFound and ValueError (also for a slot that is named twice) before anything is computed.
        """
        check_work(work, self.slots(), self.capabilities())
        return [await self.forward_backward(w.slot, w.batch, w.targets, w.loss, w.normaliser) for w in work]

    async def optim_step(
        self, slot: str, lr: float, max_grad_norm: float, optimizer: Optimizer | None = None
    ) -> StepResult:
        """Clip (0: do not), step and clear the gradients; those that are not finite are not applied.

        `optimizer` has the settings of this step; None for the slot's.
        """
        return await self.do(OptimStep(lr, max_grad_norm, optimizer=optimizer, slot=slot))

    async def discard_grads(self, slot: str) -> None:
        await self.do(DiscardGrads(slot))

    async def predictions(self, policy: Policy, batch: Batch, temperature: float = 1.0) -> Predictions:
        """Return each target's log-probability, and whether it is the likeliest token; dropout is off.

        Raises NotFound and ValueError (see `check_batch`) before anything is computed.
        """
        return await self.do(Predict(policy, batch, temperature))

    async def logprobs(self, policy: Policy, batch: Batch, temperature: float = 1.0) -> np.ndarray:
        """Return the log-probabilities of `predictions`."""
        return (await self.predictions(policy, batch, temperature)).logprobs

    async def unmet_experts(self, batch: Batch) -> Sequence[str] | None:
        """Return the experts, as `model.layers.4.mlp.experts.17`, on which no log-probability of the batch
        depends, since no token is routed there. None where the trainer does not know.
        """
        return await self.do(UnmetExperts(batch))

    async def values(self, slot: str, batch: Batch) -> np.ndarray:
        """Return a critic's value at the position that predicts each target, float32 [M]; dropout is off.

        Raises NotFound, Conflict for a slot that is no critic, and ValueError (see `check_batch`) before
        anything is computed.
        """
        return await self.do(Values(batch, slot))

    async def value_backward(
        self, slot: str, batch: Batch, targets: ValueTargets, loss: ValueLoss, normaliser: float
    ) -> LossStats:
        """Add the gradient of sum(token losses) / normaliser to a critic's, including its head's.

        It splits and accumulates as `forward_backward` does. The statistics are loss, tokens and clipped.
        Raises what `values` raises.
        """
        return await self.do(ValueBackward(batch, targets, loss, normaliser, slot))

    async def export(self, slot: str) -> Adapter:
        """Return a snapshot of the slot's adapter in fp32, without a critic's head."""
        return await self.do(ExportSlot(slot))

    async def save(self, slot: str, directory: Path) -> list[str]:
        """Write all that `load` needs into an existing directory, nothing pickled; return the file names.

        `adapter_model.safetensors` and `adapter_config.json` are among them: a checkpoint is a PEFT directory
        too. A critic's head has a file of its own.
        """
        return await self.do(SaveSlot(slot, directory))

    async def load(self, slot: str, directory: Path) -> None:
        """Restore weights, Adam state and RNG of an open slot; its dropout and seed may have changed since.

        Raises IntegrityError, and changes nothing, unless every key is there and modules, rank, alpha and
        rslora are the slot's.
        """
        await self.do(LoadSlot(slot, directory))

    async def offload(self) -> None:
        """Move the base out of device memory, and free it. Raises Conflict without the capability."""
        await self.do(Offload())

    async def relax(self) -> None:
        """Free the device memory that was only needed for a while, for other processes."""
        return

    async def onload(self) -> None:
        await self.do(Onload())

    async def close(self, slot: str) -> None:
        """Forget a slot. Raises NotFound."""
        await self.do(CloseSlot(slot))

    async def health(self) -> TrainerHealth:
        """Answer at once, also amid a call.

        A trainer that is not alive raises PoolLost from all other calls.
        """
        return TrainerHealth()

    def software(self) -> dict[str, str]:
        """Return the versions of its software by name, where that is not in this process."""
        return {}

    async def shut_down(self) -> None:  # noqa: B027 (a trainer that started nothing has nothing to do)
        """End whatever the trainer started; it is the last call."""


def check_verb(verb: TrainerVerb[Any], slots: Collection[str], takes: TrainerCapabilities) -> None:
    """Raise what the method of a verb raises for malformed arguments."""
    match verb:
        case ForwardBackward():
            check_work([verb], slots, takes)
        case ValueBackward():
            check_values(verb, takes)
        case Predict():
            check_batch(verb.batch, takes, verb.temperature)
        case Values() | UnmetExperts():
            check_batch(verb.batch, takes, 1.0)


def check_work(work: Sequence[ForwardBackward], slots: Collection[str], takes: TrainerCapabilities) -> None:
    """Raise NotFound for a slot that is not open, ValueError for a slot named twice or a malformed item.

    The normaliser may be 0 for a batch without samples.
    """
    names = [item.slot for item in work]
    for name in names:
        if name not in slots:
            raise no_slot(name, slots)
    if len(set(names)) < len(names):
        raise ValueError("a slot is named twice: join its batches, or make two calls")
    for item in work:
        loss = item.loss
        has_reference = item.targets.reference_logprobs is not None
        check_batch(item.batch, takes, loss.temperature)
        if missing := [term for term in loss.needs if term not in takes.losses]:
            raise ValueError(f"this trainer does not know {', '.join(missing)}")
        if loss.kl_coef and not has_reference:
            raise ValueError("a KL coefficient needs the reference's log-probabilities")
        if loss.anchor == "sampler" and item.targets.sampler_logprobs is None:
            raise ValueError("a ratio to the sampler needs the sampler's log-probabilities")
        if (loss.surrogate == "preference") != (loss.preference is not None):
            raise ValueError("the surrogate `preference` and the settings of a preference need each other")
        if loss.preference is not None and not has_reference:
            raise ValueError("a loss of preferences needs the reference's log-probabilities")
        if loss.has_pairs and not np.isin(item.batch.group_sizes, (0, 2)).all():
            raise ValueError("a loss of pairs needs a chosen and a rejected sample in each group")
        _check_arrays(item.batch, item.targets)
        _check_normaliser(item.batch, item.normaliser)


def no_slot(name: str, slots: Collection[str]) -> NotFound:
    """Make the error for a slot that is not open."""
    return NotFound(f"no slot {name} is open", hint=f"open slots: {', '.join(sorted(slots)) or 'none'}")


def check_values(work: ValueBackward, takes: TrainerCapabilities) -> None:
    """Raise ValueError for malformed arguments of `Trainer.value_backward`."""
    check_batch(work.batch, takes, 1.0)
    _check_arrays(work.batch, work.targets)
    if work.loss.clip is not None and not work.loss.clip > 0:
        raise ValueError(f"the clip is {work.loss.clip}, not a positive number")
    _check_normaliser(work.batch, work.normaliser)


def check_batch(batch: Batch, takes: TrainerCapabilities, temperature: float) -> None:
    """Raise ValueError for lengths that do not add up or exceed the trainer's, for token ids outside of the
    vocabulary, for routes that are not the base's and for a temperature that is not positive.
    """
    batch.check()
    if batch.labels is not None and LABELS not in takes.losses:
        raise ValueError("this trainer predicts the tokens of the batch and no other labels")
    if batch.routes is not None:
        if takes.routes is None:
            raise ValueError("this trainer replays no routes")
        takes.routes.check(batch.routes.prompts)
        takes.routes.check(batch.routes.completions)
    samples = np.repeat(batch.prompt_lengths, batch.group_sizes) + batch.completion_lengths
    if batch.labels is not None:
        samples = samples - 1  # the last token is never read, nor predicted
    for kind, lengths in (("prompt", batch.prompt_lengths), ("sample", samples)):
        if (longest := lengths.max(initial=0)) > takes.max_tokens:
            raise ValueError(f"a {kind} of {longest} tokens exceeds the {takes.max_tokens} of the base")
    labels = {} if batch.labels is None else {"labels": batch.labels}
    for kind, ids in {"prompts": batch.prompts, "completions": batch.completions, **labels}.items():
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"the {kind} are no token ids")
        outside = ids[(ids < 0) | (ids >= takes.vocab)]
        if outside.size:
            raise ValueError(f"token {outside[0]} in the {kind} is none of the {takes.vocab} of the base")
    if not 0 < temperature < math.inf:
        raise ValueError(f"the temperature is {temperature}, not a positive number")


def _check_normaliser(batch: Batch, normaliser: float) -> None:
    if batch.completions.size and not 0 < normaliser < math.inf:
        raise ValueError(f"the normaliser is {normaliser}, not a positive number")


def _check_arrays(batch: Batch, targets: PolicyTargets | ValueTargets) -> None:
    for name, array in asdict(targets).items():
        if array is not None and array.size != batch.targets.size:
            raise ValueError(f"{name} has {array.size} numbers for {batch.targets.size} sampled tokens")
        if array is not None and not np.issubdtype(array.dtype, np.number):
            raise ValueError(f"{name} has no numbers")
    if targets.weights is not None and not (np.isfinite(targets.weights) & (targets.weights >= 0)).all():
        raise ValueError("a weight is negative or not finite")
