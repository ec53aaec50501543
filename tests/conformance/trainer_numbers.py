"""What a trainer's numbers mean: transformers and peft are the judge."""

from pathlib import Path

import numpy as np
import pytest

from lorad.adapters.peft import write_peft
from lorad.errors import AdapterRefused
from lorad.protocol.batch import Batch
from lorad.trainers.base import Policy, Trainer
from tests.conformance.reference import random_batch, reference_logprobs, reference_model
from tests.conformance.trainer_kit import (
    BASE,
    TrainerCase,
    accumulate,
    flat,
    open_trained,
    spec_for,
    targets_for,
    train,
)


class Numbers(TrainerCase):
    async def test_base_logprobs_are_those_of_transformers(self, trainer: Trainer, base: Path) -> None:
        batch = random_batch(0)
        expected = reference_logprobs(reference_model(base), batch, temperature=0.7).detach().numpy()
        found = await trainer.logprobs(BASE, batch, temperature=0.7)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-4)

    async def test_correct_tokens_are_the_likeliest(self, trainer: Trainer) -> None:
        everyone = [np.array([token], np.int32) for token in range(trainer.capabilities().vocab)]
        batch = Batch.of([(np.array([3, 1, 2], np.int32), everyone)])
        found = await trainer.predictions(BASE, batch)
        assert found.correct.dtype == np.bool_ and found.correct.nonzero()[0] == [found.logprobs.argmax()]
        await trainer.open("a", spec_for(trainer))
        assert (await accumulate(trainer, "a", batch)).correct == 1

    async def test_a_new_adapter_changes_nothing(self, trainer: Trainer) -> None:
        await trainer.open("new", spec_for(trainer, dropout=0.5))
        policy = await trainer.logprobs(Policy("new"), random_batch(0))
        assert self.same(trainer, policy, await trainer.logprobs(BASE, random_batch(0)))

    async def test_peft_computes_the_same_with_the_export(
        self, trainer: Trainer, base: Path, tmp_path: Path
    ) -> None:
        await open_trained(trainer, "a")
        write_peft(await trainer.export("a"), tmp_path, str(base))
        expected = reference_logprobs(reference_model(base, tmp_path), random_batch(5)).detach().numpy()
        found = await trainer.logprobs(Policy("a"), random_batch(5))
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert np.abs(found - await trainer.logprobs(BASE, random_batch(5))).max() > 0.01

    async def test_frozen_slot_agrees_with_peft_while_others_train(
        self, trainer: Trainer, base: Path, tmp_path: Path
    ) -> None:
        await open_trained(trainer, "a")
        exported = await trainer.export("a")
        write_peft(exported, tmp_path, str(base))
        info = await trainer.open("reference", spec_for(trainer, source=tmp_path, frozen=True))
        batch = random_batch(5)
        before = await trainer.logprobs(Policy("reference"), batch)
        await train(trainer, "a", range(7, 9))
        expected = reference_logprobs(reference_model(base, tmp_path), batch).detach().numpy()
        np.testing.assert_allclose(before, expected, atol=1e-4)
        assert self.same(trainer, await trainer.logprobs(Policy("reference"), batch), before)
        assert (
            (await trainer.export("reference")).digest()
            == exported.digest()
            != (await trainer.export("a")).digest()
        )
        assert info.bytes == 4 * info.parameters

    async def test_amplified_is_as_with_a_larger_alpha(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_trained(trainer, "a", dropout=0.1)
        plain, exported = await trainer.logprobs(Policy("a"), random_batch(5)), await trainer.export("a")
        amplified = await trainer.logprobs(Policy("a", amplify=8.0), random_batch(5))
        write_peft(exported.amplified(8.0), tmp_path, "base")
        await trainer.open("larger", spec_for(trainer, alpha=64, source=tmp_path))
        larger = await trainer.logprobs(Policy("larger"), random_batch(5))
        np.testing.assert_allclose(amplified, larger, atol=self.close_to)
        assert np.abs(amplified - plain).max() > 0.1
        assert self.same(trainer, await trainer.logprobs(Policy("a"), random_batch(5)), plain)
        assert np.array_equal(flat(await trainer.export("a")), flat(exported))

    @pytest.mark.parametrize("leaves", [("q_proj", "v_proj"), ("k_proj", "up_proj"), ("o_proj", "gate_proj")])
    async def test_parts_of_fused_linears_can_be_targeted(
        self, trainer: Trainer, base: Path, tmp_path: Path, leaves: tuple[str, ...]
    ) -> None:
        modules = tuple(sorted(name for name in trainer.modules() if name.endswith(leaves)))
        leaves = tuple(leaf for leaf in leaves if any(name.endswith(leaf) for name in modules))
        if not self.one_sided_targets:
            with pytest.raises(AdapterRefused):
                await trainer.open("a", spec_for(trainer, modules=modules))
            return
        await open_trained(trainer, "a", modules=modules)
        exported = await trainer.export("a")
        assert len(exported.tensors) == 2 * len(modules) >= 2 * 2 * len(leaves)
        if any("experts" in name for name in modules):
            return  # PEFT takes all three linears of an expert or none
        write_peft(exported, tmp_path, str(base))
        expected = reference_logprobs(reference_model(base, tmp_path), random_batch(5)).detach().numpy()
        np.testing.assert_allclose(await trainer.logprobs(Policy("a"), random_batch(5)), expected, atol=1e-4)

    async def test_the_gradient_is_that_of_autograd_through_peft(
        self, trainer: Trainer, base: Path, tmp_path: Path
    ) -> None:
        await open_trained(trainer, "a")
        write_peft(await trainer.export("a"), tmp_path, str(base))
        model, batch = reference_model(base, tmp_path), random_batch(5)
        await accumulate(trainer, "a", batch)
        weights = targets_for(batch).advantages / batch.completions.size
        logprobs = reference_logprobs(model, batch)
        logprobs.backward(-logprobs.new_tensor(weights))
        squares = [float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None]
        result = await trainer.optim_step("a", 0.0, 0.0)
        assert result.grad_norm == pytest.approx(sum(squares) ** 0.5, rel=1e-3)

    async def test_statistics_are_sums_over_tokens(self, trainer: Trainer) -> None:
        await trainer.open("a", spec_for(trainer))
        batch = random_batch(0)
        sampler = await trainer.logprobs(BASE, batch) - np.float32(0.25)
        stats = await accumulate(trainer, "a", batch, sampler_logprobs=sampler)
        assert stats.tokens == batch.completions.size
        assert stats.ratio == pytest.approx(stats.tokens)
        assert stats.sampler_difference == pytest.approx(0.25 * stats.tokens, rel=1e-3)
        assert stats.sampler_difference_max == pytest.approx(0.25, rel=1e-3)
        weighed = targets_for(batch).advantages
        assert stats.loss == pytest.approx(-weighed.mean(), rel=1e-4)

    async def test_training_makes_a_rewarded_sample_likelier(self, trainer: Trainer) -> None:
        await trainer.open("a", spec_for(trainer))
        batch = random_batch(0, groups=1, samples=1)
        before = await trainer.logprobs(Policy("a"), batch)
        for _ in range(3):
            await accumulate(trainer, "a", batch, advantages=np.ones(batch.completions.size, np.float32))
            await trainer.optim_step("a", 1e-2, 0.0)
        assert (await trainer.logprobs(Policy("a"), batch)).sum() > before.sum() + 1
