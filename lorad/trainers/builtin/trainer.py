"""The builtin trainer: the trainer protocol on one process and one device.

Contracts are stated in `trainers/base.py`.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from lorad.adapters.adapter import Adapter
from lorad.errors import Conflict
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.directory import linear_shapes
from lorad.models.experts import route_shape
from lorad.protocol.batch import (
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
from lorad.protocol.calls import ForwardBackward, StepResult, ValueBackward
from lorad.trainers.base import (
    Policy,
    SlotInfo,
    SlotSpec,
    Trainer,
    TrainerCapabilities,
    check_batch,
    check_values,
    check_work,
)
from lorad.trainers.builtin import critic, passes, routes
from lorad.trainers.builtin.ahead import LayoutsAhead
from lorad.trainers.builtin.lent import CacheLender
from lorad.trainers.builtin.lora import SlotLora
from lorad.trainers.builtin.microbatch import BatchPiece, mixed, plan
from lorad.trainers.builtin.slot import Slot, load_slot, new_slot, save_slot
from lorad.trainers.device_memory import give_back
from lorad.trainers.slots import Slots

log = logging.getLogger(__name__)

_TOKENS_PER_MICROBATCH = 16384
"""For log-probabilities of the base, which belong to no slot."""


class BuiltinTrainer(Trainer):
    """Every torch call runs on `compute`, one micro-batch at a time, so that slots and the engine share it
    fairly. `model` is what a PEFT directory names as its base model.
    """

    def __init__(self, base: Base, compute: Compute, model: str = "") -> None:
        self._base = base
        self._compute = compute
        self._model = model
        self._slots = Slots[Slot]()
        self._may_halve = base.device.type == "cuda"  # a CPU without memory ends the process
        self.lender: CacheLender | None = None  # of memory that the engine does not need while this trains

    def capabilities(self) -> TrainerCapabilities:
        """Return what this trainer can do; on a GPU it is deterministic only where torch refuses
        nondeterministic kernels.
        """
        refuses = (
            torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        return TrainerCapabilities(
            dtype=str(self._base.dtype).removeprefix("torch."),
            max_tokens=self._base.config.max_position_embeddings,
            vocab=self._base.config.vocab_size,
            deterministic=self._base.device.type == "cpu" or refuses,
            offload=False,
            routes=route_shape(self._base),
        )

    def modules(self) -> dict[str, tuple[int, int]]:
        return linear_shapes(self._base.config)

    def slots(self) -> tuple[str, ...]:
        return tuple(self._slots)

    async def base_checksum(self) -> str:
        return await self._compute.run(self._base.checksum)

    async def open(self, slot: str, spec: SlotSpec) -> SlotInfo:
        if slot in self._slots:
            raise Conflict(f"slot {slot} is open already", hint="close it first, or choose another name")
        opened = await self._compute.run(new_slot, self._base, spec)
        if slot in self._slots:
            raise Conflict(f"slot {slot} was opened meanwhile", hint="choose another name")
        self._slots[slot] = opened
        return opened.info(slot)

    async def forward_backward(
        self, slot: str, batch: Batch, targets: PolicyTargets, loss: PolicyLoss, normaliser: float
    ) -> Gradients:
        return (await self._forward_backward([ForwardBackward(batch, targets, loss, normaliser, slot)]))[0]

    async def forward_backward_many(self, work: Sequence[ForwardBackward]) -> list[Gradients]:
        return await self._forward_backward(work)

    async def _forward_backward(self, work: Sequence[ForwardBackward]) -> list[Gradients]:
        check_work(work, self._slots, self.capabilities())
        slots = [self._slots.policy(item.slot) for item in work]
        if not self._may_halve:
            return await self._passes(slots, work)
        before = await self._compute.run(
            lambda: [(slot.grads.clone(), slot.dropout.get_state()) for slot in slots]
        )
        try:
            return await self._passes(slots, work)
        except torch.OutOfMemoryError as error:
            log.warning("micro-batches are halved: %s", error)
        await self._compute.run(self._begin_again, slots, before)
        results = await self._passes(slots, work)
        return [
            replace(each, halved_to=slot.tokens_per_microbatch)
            for each, slot in zip(results, slots, strict=True)
        ]

    def _begin_again(self, slots: Sequence[Slot], before: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Undo a call that found no memory, and let the next one need half of it."""
        for slot, (gradients, dropout) in zip(slots, before, strict=True):
            slot.grads.copy_(gradients)
            slot.dropout.set_state(dropout)
            slot.tokens_per_microbatch = max(1, slot.tokens_per_microbatch // 2)
        give_back(self._base.device)

    async def _passes(self, slots: Sequence[Slot], work: Sequence[ForwardBackward]) -> list[Gradients]:
        budgets = [slot.tokens_per_microbatch for slot in slots]
        lender = self.lender if all(slot.spec.lent_tokens for slot in slots) else None
        if lender is not None and await self._compute.run(lender.lend) is not None:
            budgets = [min(slot.tokens_per_microbatch, slot.spec.lent_tokens) for slot in slots]
        plans = [
            plan(item.batch, budget, share=not slot.spec.adapter.dropout, whole=item.loss.has_pairs)
            for item, budget, slot in zip(work, budgets, slots, strict=True)
        ]
        ahead = LayoutsAhead(self._base, mixed(plans, max(budgets, default=0)))
        stats = [LossStats() for _ in work]
        logprobs = [
            np.empty(w.batch.targets.size, np.float32) if w.loss.returns_logprobs else None for w in work
        ]
        for results in await self._compute.each(ahead.each(partial(self._gradients, slots, work))):
            for index, (piece, more) in results.items():
                stats[index] += more
                if (whole := logprobs[index]) is not None:
                    whole[piece.targets] = more.logprobs
        return [Gradients.of(*each) for each in zip(stats, logprobs, strict=True)]

    async def optim_step(
        self, slot: str, lr: float, max_grad_norm: float, optimizer: Optimizer | None = None
    ) -> StepResult:
        step = self._slots.trained(slot).optim_step
        norm, applied = await self._compute.run(step, lr, max_grad_norm, optimizer)
        return StepResult(grad_norm=norm, applied=applied)

    async def discard_grads(self, slot: str) -> None:
        await self._compute.run(self._slots.trained(slot).grads.zero_)

    async def predictions(self, policy: Policy, batch: Batch, temperature: float = 1.0) -> Predictions:
        open_slot = None if policy.slot is None else self._slots[policy.slot]
        check_batch(batch, self.capabilities(), temperature)
        size = batch.targets.size
        result = Predictions(np.empty(size, np.float32), np.empty(size, np.bool_))
        budget = open_slot.tokens_per_microbatch if open_slot else _TOKENS_PER_MICROBATCH
        pieces = list(plan(batch, budget, share=True))
        ahead = LayoutsAhead(self._base, ({0: piece} for piece in pieces))
        quanta = ahead.each(partial(self._score, open_slot, temperature, policy.amplify))
        for piece, scores in zip(pieces, await self._compute.each(quanta), strict=True):
            result.logprobs[piece.targets], result.correct[piece.targets] = scores
        return result

    async def unmet_experts(self, batch: Batch) -> Sequence[str]:
        if self._base.config.experts is None:
            return ()
        texts = [(prompt, text) for prompt, completions in batch.groups() for text in completions]
        quanta = (partial(routes.experts_met, self._base, *text) for text in texts)
        met = set[tuple[int, str]]().union(*await self._compute.each(quanta))
        return routes.unmet(self._base, met)

    async def values(self, slot: str, batch: Batch) -> np.ndarray:
        head_slot = self._slots.critic(slot)
        check_batch(batch, self.capabilities(), 1.0)
        result = np.empty(batch.targets.size, np.float32)
        pieces = list(plan(batch, head_slot.tokens_per_microbatch, share=True))
        quanta = LayoutsAhead(self._base, ({0: piece} for piece in pieces)).each(
            partial(critic.values, self._base, head_slot)
        )
        for piece, values in zip(pieces, await self._compute.each(quanta), strict=True):
            result[piece.targets] = values
        return result

    async def value_backward(
        self, slot: str, batch: Batch, targets: ValueTargets, loss: ValueLoss, normaliser: float
    ) -> LossStats:
        head_slot = self._slots.critic(slot, trained=True)
        work = ValueBackward(batch, targets, loss, normaliser)
        check_values(work, self.capabilities())
        pieces = plan(batch, head_slot.tokens_per_microbatch, share=not head_slot.spec.adapter.dropout)
        quanta = LayoutsAhead(self._base, ({0: piece} for piece in pieces)).each(
            partial(critic.backward, self._base, head_slot, work)
        )
        return sum(await self._compute.each(quanta), LossStats())

    async def export(self, slot: str) -> Adapter:
        return await self._compute.run(self._slots[slot].snapshot)

    async def save(self, slot: str, directory: Path) -> list[str]:
        return await self._compute.run(save_slot, self._slots.trained(slot), directory, self._model)

    async def load(self, slot: str, directory: Path) -> None:
        await self._compute.run(load_slot, self._slots.trained(slot), directory)

    async def offload(self) -> None:
        raise Conflict("the builtin trainer cannot offload: its base is shared with the engine")

    async def relax(self) -> None:
        await self._compute.run(give_back, self._base.device)

    async def onload(self) -> None:
        raise Conflict("the builtin trainer cannot offload: its base is always loaded")

    async def close(self, slot: str) -> None:
        self._slots.close(slot)

    def _gradients(
        self, slots: Sequence[Slot], work: Sequence[ForwardBackward], ahead: LayoutsAhead
    ) -> dict[int, tuple[BatchPiece, Gradients]]:
        """Accumulate the gradients of one micro-batch, which has pieces of slots, by the slot's index."""
        joined, rows = ahead.take()
        mine = [slots[index] for index in joined]
        lora = SlotLora(mine, rows.rows, train=True)
        arena = None
        checkpointing = any(slot.recomputes(rows.ids.numel()) for slot in mine)
        if checkpointing and self.lender is not None:
            arena = self.lender.arena(self._base, mine, rows.ids.numel())
            checkpointing = arena is None
        own = [work[index] for index in joined]
        stats = passes.forward_backward(self._base, rows, lora, own, checkpointing, ahead.lay, arena)
        pairs = zip(joined.values(), stats, strict=True)
        return dict(zip(joined, pairs, strict=True))

    def _score(
        self, slot: Slot | None, temperature: float, amplify: float, ahead: LayoutsAhead
    ) -> tuple[np.ndarray, np.ndarray]:
        _, rows = ahead.take()
        lora = None if slot is None else SlotLora([slot], rows.rows, train=False, amplify=amplify)
        return passes.score(self._base, rows, lora, temperature, ahead.lay)
