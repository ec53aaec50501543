"""Several slots in one call: each gets what a call of its own would have given it."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lorad.errors import NotFound
from lorad.protocol.batch import Batch, Gradients, LossStats, PolicyLoss, PolicyTargets
from lorad.protocol.calls import ForwardBackward
from lorad.trainers.base import Policy, SlotSpec, Trainer
from tests.conformance.reference import random_batch
from tests.conformance.trainer_kit import PLAIN, TrainerCase, flat, saved, spec_for, targets_for, train


def work_for(slot: str, seed: int, groups: int = 3, **loss: object) -> ForwardBackward:
    batch = random_batch(seed, groups=groups)
    targets = targets_for(batch, seed)
    chosen = msgspec.structs.replace(PolicyLoss(), **loss)
    if chosen.kl_coef:
        targets = msgspec.structs.replace(
            targets, reference_logprobs=targets_for(batch, seed + 1).sampler_logprobs
        )
    return ForwardBackward(batch, targets, chosen, float(batch.completions.size), slot)


async def one_by_one(trainer: Trainer, work: Sequence[ForwardBackward]) -> list[LossStats]:
    return [await trainer.forward_backward(w.slot, w.batch, w.targets, w.loss, w.normaliser) for w in work]


class Many(TrainerCase):
    def unlike(self, trainer: Trainer) -> dict[str, tuple[SlotSpec, ForwardBackward]]:
        """Slots with different ranks, targets, budgets and dropout, and works with different losses."""
        some = tuple(sorted(name for name in trainer.modules() if name.endswith(("o_proj", "down_proj"))))
        return {
            "plain": (spec_for(trainer, seed=1), work_for("plain", 1)),
            "hot": (spec_for(trainer, rank=2, seed=2), work_for("hot", 2, temperature=0.7, ratio="sequence")),
            "dropped": (spec_for(trainer, dropout=0.3, seed=3), work_for("dropped", 3, clip_high=0.3)),
            "narrow": (spec_for(trainer, modules=some, alpha=3, seed=4), work_for("narrow", 4, kl_coef=0.1)),
            "cut": (spec_for(trainer, dropout=0.1, tokens_per_microbatch=30), work_for("cut", 5, groups=5)),
        }

    async def end_of(
        self, trainer: Trainer, way: Callable[[Sequence[ForwardBackward]], Awaitable[Sequence[LossStats]]]
    ) -> tuple[Sequence[LossStats], list[float], list[np.ndarray]]:
        """(statistics, norms of the gradients, weights after a step) of each slot; the slots are closed."""
        kinds = self.unlike(trainer)
        for slot, (spec, _) in kinds.items():
            await trainer.open(slot, spec)
            await train(trainer, slot, range(1))  # B is not zero any more
        stats = await way([item for _, item in kinds.values()])
        norms = [(await trainer.optim_step(slot, 1e-2, 0.0)).grad_norm for slot in kinds]
        weights = [flat(await trainer.export(slot)) for slot in kinds]
        for slot in kinds:
            await trainer.close(slot)
        return stats, norms, weights

    async def test_slots_in_one_call_equal_separate_calls(self, trainer: Trainer) -> None:
        stats, norms, weights = await self.end_of(trainer, trainer.forward_backward_many)
        alone = await self.end_of(trainer, partial(one_by_one, trainer))
        for ours, theirs in zip(stats, alone[0], strict=True):
            assert msgspec.structs.astuple(ours) == pytest.approx(
                msgspec.structs.astuple(theirs), rel=1e-3, abs=1e-4
            )
        assert norms == pytest.approx(alone[1], rel=1e-4) and min(norms) > 0
        for mine, own in zip(weights, alone[2], strict=True):
            # Adam blows up what is next to zero
            np.testing.assert_allclose(mine, own, atol=100 * self.close_to)

    async def test_the_same_call_gives_the_same(self, trainer: Trainer, tmp_path: Path) -> None:
        ends = []
        for name in ("once", "again"):
            for slot, (spec, _) in self.unlike(trainer).items():
                await trainer.open(slot, spec)
            await trainer.forward_backward_many([item for _, item in self.unlike(trainer).values()])
            await trainer.optim_step("dropped", 1e-2, 1.0)
            ends.append(await saved(trainer, "dropped", tmp_path / name))
            for slot in self.unlike(trainer):
                await trainer.close(slot)
        self.assert_same_files(trainer, *ends)

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    async def test_what_is_not_finite_stays_in_its_slot(self, trainer: Trainer, poison: float) -> None:
        ends = []
        for factor in (1, poison):
            for slot in ("healthy", "poisoned"):
                await trainer.open(slot, spec_for(trainer, optimizer=PLAIN))
            good, bad = work_for("healthy", 1), work_for("poisoned", 2)
            advantages = bad.targets.advantages * np.float32(factor)
            bad = msgspec.structs.replace(
                bad, targets=msgspec.structs.replace(bad.targets, advantages=advantages)
            )
            await trainer.forward_backward_many([good, bad])
            assert (await trainer.optim_step("poisoned", PLAIN.eps, 0.0)).applied == (factor == 1)
            assert (await trainer.optim_step("healthy", PLAIN.eps, 0.0)).applied
            ends.append(flat(await trainer.export("healthy")))
            for slot in ("healthy", "poisoned"):
                await trainer.close(slot)
        np.testing.assert_allclose(ends[1], ends[0], atol=self.close_to)

    @pytest.mark.parametrize(
        "change",
        [
            {"loss": PolicyLoss(kl_coef=0.1)},
            {"loss": PolicyLoss(temperature=0.0)},
            {"loss": PolicyLoss(temperature=np.nan)},
            {"normaliser": 0.0},
            {"normaliser": -1.0},
            {"normaliser": np.nan},
            {"normaliser": np.inf},
        ],
        ids=str,
    )
    async def test_what_can_not_be_computed_is_refused_before(
        self, trainer: Trainer, change: dict[str, object]
    ) -> None:
        for slot in ("a", "b"):
            await trainer.open(slot, spec_for(trainer))
        with pytest.raises(ValueError):
            await trainer.forward_backward_many(
                [work_for("a", 1), msgspec.structs.replace(work_for("b", 2), **change)]
            )
        assert (await trainer.optim_step("a", 1e-2, 1.0)).grad_norm == 0

    @pytest.mark.parametrize("fault", ["targets", "lengths", "too long", "no slot", "twice"])
    async def test_bad_item_is_refused_before_any_is_computed(self, trainer: Trainer, fault: str) -> None:
        for slot in ("a", "b"):
            await trainer.open(slot, spec_for(trainer))
        good, bad = work_for("a", 1), work_for("b", 2)
        replace = msgspec.structs.replace
        if fault == "targets":
            bad = replace(bad, targets=replace(bad.targets, advantages=np.ones(1, np.float32)))
        elif fault == "lengths":
            bad = replace(bad, batch=replace(bad.batch, prompt_lengths=bad.batch.prompt_lengths + 1))
        elif fault == "too long":
            longer = np.full(trainer.capabilities().max_tokens, 5, np.int32)
            prompts, lengths = np.concatenate([bad.batch.prompts, longer]), bad.batch.prompt_lengths.copy()
            lengths[-1] += longer.size
            bad = replace(bad, batch=replace(bad.batch, prompts=prompts, prompt_lengths=lengths))
        else:
            bad = replace(bad, slot="c" if fault == "no slot" else "a")
        with pytest.raises(NotFound if fault == "no slot" else ValueError):
            await trainer.forward_backward_many([good, bad])
        assert (await trainer.optim_step("a", 1e-2, 1.0)).grad_norm == 0

    async def test_no_work_is_no_work(self, trainer: Trainer) -> None:
        assert await trainer.forward_backward_many([]) == []

    async def test_a_batch_without_samples_may_be_among_others(self, trainer: Trainer) -> None:
        for slot in ("a", "b"):
            await trainer.open(slot, spec_for(trainer))
        stats = await trainer.forward_backward_many([work_for("a", 1, groups=0), work_for("b", 2)])
        assert stats[0] == Gradients() and stats[1].tokens > 0
        assert (await trainer.optim_step("a", 1e-2, 1.0)).grad_norm == 0
        assert (await trainer.optim_step("b", 1e-2, 1.0)).grad_norm > 0

    async def test_a_group_without_samples_changes_nothing(self, trainer: Trainer) -> None:
        prompt, sample, other = (np.array(ids, np.int32) for ids in ([1, 2, 3], [4, 5], [9] * 20))
        targets, steps = PolicyTargets(np.ones(4, np.float32), np.zeros(4, np.float32)), []
        for empty in (False, True):
            between: list[tuple[np.ndarray, list[np.ndarray]]] = [(other, [])] if empty else []
            batch = Batch.of([*between, (prompt, [sample]), *between, (prompt, [sample]), *between])
            await trainer.open("a", spec_for(trainer, optimizer=PLAIN, tokens_per_microbatch=8))
            await trainer.forward_backward_many([ForwardBackward(batch, targets, PolicyLoss(), 4.0, "a")])
            await trainer.optim_step("a", PLAIN.eps, 0.0)
            steps.append(flat(await trainer.export("a")))
            await trainer.close("a")
        assert self.same(trainer, *steps)

    async def test_the_open_slots_are_known(self, trainer: Trainer) -> None:
        for slot in ("a", "b"):
            await trainer.open(slot, spec_for(trainer))
        await trainer.close("a")
        assert tuple(trainer.slots()) == ("b",)
        assert (await trainer.logprobs(Policy("b"), random_batch(0))).size > 0
