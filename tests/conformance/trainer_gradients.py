"""How gradients accumulate and how a step applies them."""

from pathlib import Path

import numpy as np
import pytest

from lorad.adapters.peft import write_peft
from lorad.protocol.batch import Batch, LossStats, Optimizer, PolicyLoss, PolicyTargets
from lorad.trainers.base import Policy, Trainer
from tests.conformance.reference import random_batch
from tests.conformance.trainer_kit import (
    PLAIN,
    TrainerCase,
    accumulate,
    file_names,
    flat,
    open_trained,
    spec_for,
    targets_for,
    train,
)


class OnPlain(TrainerCase):
    """A slot whose steps subtract the gradient, for rules that look at it."""

    async def gradient(self, trainer: Trainer, slot: str) -> np.ndarray:
        """The accumulated gradient, read off a plain step; the slot is closed."""
        before = flat(await trainer.export(slot))
        await trainer.optim_step(slot, PLAIN.eps, 0.0)
        step: np.ndarray = before - flat(await trainer.export(slot))
        await trainer.close(slot)
        assert np.abs(step).max() > 1e-3
        return step

    async def open_plain(self, trainer: Trainer, start: Path, **settings: object) -> None:
        await trainer.open("plain", spec_for(trainer, source=start, optimizer=PLAIN, **settings))

    @pytest.fixture(scope="class")
    @classmethod
    def place_of_start(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("start")

    @pytest.fixture
    async def start(self, trainer: Trainer, place_of_start: Path) -> Path:
        """A PEFT directory of a slot after two steps, made once for all tests of a class."""
        if not file_names(place_of_start):
            await open_trained(trainer, "start")
            write_peft(await trainer.export("start"), place_of_start, "")
            await trainer.close("start")
        return place_of_start


class Gradients(OnPlain):
    """How they accumulate."""

    async def test_halves_accumulate_to_the_whole(self, trainer: Trainer, start: Path) -> None:
        batch = random_batch(5, groups=2)
        await self.open_plain(trainer, start)
        whole_stats = await accumulate(trainer, "plain", batch)
        whole = await self.gradient(trainer, "plain")
        await self.open_plain(trainer, start)
        stats, place = LossStats(), 0
        for group in batch.groups():
            half = Batch.of([group])
            tokens = slice(place, place + half.completions.size)
            place = tokens.stop
            targets = targets_for(batch)
            assert targets.sampler_logprobs is not None
            part = PolicyTargets(targets.advantages[tokens], targets.sampler_logprobs[tokens])
            stats += await trainer.forward_backward(
                "plain", half, part, PolicyLoss(), float(batch.completions.size)
            )
        np.testing.assert_allclose(await self.gradient(trainer, "plain"), whole, atol=self.close_to)
        assert stats.loss == pytest.approx(whole_stats.loss, rel=1e-4)

    async def test_the_size_of_micro_batches_does_not_matter(self, trainer: Trainer, start: Path) -> None:
        batch, steps = random_batch(5), []
        for budget in (16384, 40, 1):
            await self.open_plain(trainer, start, tokens_per_microbatch=budget)
            await accumulate(trainer, "plain", batch)
            steps.append(await self.gradient(trainer, "plain"))
        np.testing.assert_allclose(steps[1], steps[0], atol=self.close_to)
        np.testing.assert_allclose(steps[2], steps[0], atol=self.close_to)

    async def test_cutting_a_group_with_twins_changes_nothing(self, trainer: Trainer, start: Path) -> None:
        a, b, x, y = [9, 8, 7], [6, 5, 4, 3, 2], list(range(20, 31)), [50, 51, 52]
        samples = [np.array(sample, np.int32) for sample in (a, b, x, y, b, a)]
        batch, steps, logprobs = Batch.of([(np.array([5], np.int32), samples)]), [], []
        for budget in (16384, 17):
            await self.open_plain(trainer, start, tokens_per_microbatch=budget)
            logprobs.append(await trainer.logprobs(Policy("plain"), batch))
            await accumulate(trainer, "plain", batch)
            steps.append(await self.gradient(trainer, "plain"))
        np.testing.assert_allclose(logprobs[1], logprobs[0], atol=self.close_to)
        np.testing.assert_allclose(steps[1], steps[0], atol=self.close_to)

    async def test_recomputing_layers_without_adapters_changes_no_bit(self, trainer: Trainer) -> None:
        last = max(
            trainer.modules(), key=lambda name: [int(part) for part in name.split(".") if part.isdigit()]
        )
        steps = []
        for recomputed in (False, True):
            await open_trained(trainer, "a", modules=(last,), activation_checkpointing=recomputed)
            steps.append(flat(await trainer.export("a")))
            await trainer.close("a")
        assert self.same(trainer, *steps)

    @pytest.mark.parametrize("dropout", [0.0, 0.2])
    async def test_recomputed_activations_change_no_bit(
        self, trainer: Trainer, start: Path, dropout: float
    ) -> None:
        steps, stats = [], []
        for recomputed in (False, True):
            await self.open_plain(trainer, start, dropout=dropout, activation_checkpointing=recomputed)
            for seed in (5, 6):  # the second batch draws masks where the first one left the generator
                stats.append(await accumulate(trainer, "plain", random_batch(seed)))
            steps.append(await self.gradient(trainer, "plain"))
        assert self.same(trainer, *steps)
        if trainer.capabilities().deterministic:
            assert stats[:2] == stats[2:]

    async def test_samples_with_the_same_tokens_each_count(self, trainer: Trainer, start: Path) -> None:
        prompt, sample = np.array([5, 6, 7], np.int32), np.array([9, 8, 7], np.int32)
        twice, once = Batch.of([(prompt, [sample, sample])]), Batch.of([(prompt, [sample])])
        steps = []
        for batch, advantages in ((twice, [1.5, -0.5]), (once, [1.0])):
            await self.open_plain(trainer, start)
            each = np.repeat(np.array(advantages, np.float32), batch.completion_lengths)
            targets = PolicyTargets(each, np.zeros(batch.completions.size, np.float32))
            stats = await trainer.forward_backward("plain", batch, targets, PolicyLoss(), 3.0)
            assert stats.tokens == batch.completions.size
            steps.append(await self.gradient(trainer, "plain"))
        np.testing.assert_allclose(steps[0], steps[1], atol=self.close_to)

    async def test_the_norm_is_reported_before_it_is_clipped(self, trainer: Trainer, start: Path) -> None:
        steps, norms = [], []
        for limit in (0.0, 0.01):
            await self.open_plain(trainer, start)
            await accumulate(trainer, "plain", random_batch(5))
            before = flat(await trainer.export("plain"))
            norms.append((await trainer.optim_step("plain", PLAIN.eps, limit)).grad_norm)
            steps.append(before - flat(await trainer.export("plain")))
            await trainer.close("plain")
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        assert np.linalg.norm(steps[0]) == pytest.approx(norms[0], rel=1e-4)
        np.testing.assert_allclose(steps[1], steps[0] * 0.01 / norms[0], atol=self.close_to)


class Steps(OnPlain):
    """What a step does with them: the body behind a trainer has no part in it."""

    async def test_the_normaliser_divides_loss_and_gradient(self, trainer: Trainer, start: Path) -> None:
        batch, results = random_batch(5), []
        for normaliser in (10.0, 40.0):
            await self.open_plain(trainer, start)
            stats = await trainer.forward_backward(
                "plain", batch, targets_for(batch), PolicyLoss(), normaliser
            )
            results.append((stats.loss, await self.gradient(trainer, "plain")))
        assert results[0][0] == pytest.approx(4 * results[1][0], rel=1e-4)
        np.testing.assert_allclose(results[0][1], 4 * results[1][1], atol=self.close_to)

    async def test_old_logprobs_of_the_same_policy_change_nothing(
        self, trainer: Trainer, start: Path
    ) -> None:
        batch, steps = random_batch(5), []
        for known in (False, True):
            await self.open_plain(trainer, start)
            old = await trainer.logprobs(Policy("plain"), batch) if known else None
            stats = await accumulate(trainer, "plain", batch, old_logprobs=old)
            assert stats.ratio == pytest.approx(stats.tokens, rel=1e-4)
            steps.append(await self.gradient(trainer, "plain"))
        np.testing.assert_allclose(steps[1], steps[0], atol=self.close_to)

    async def test_logprobs_come_back_on_request(self, trainer: Trainer, start: Path) -> None:
        batch = random_batch(5, groups=3)
        await self.open_plain(trainer, start, tokens_per_microbatch=40)
        before = await trainer.logprobs(Policy("plain"), batch)
        targets, total = targets_for(batch), float(batch.completions.size)
        asked = PolicyLoss(returns_logprobs=True)
        found = await trainer.forward_backward("plain", batch, targets, asked, total)
        assert found.logprobs is not None and found.logprobs.dtype == np.float32
        np.testing.assert_allclose(found.logprobs, before, atol=self.close_to)
        assert (await trainer.forward_backward("plain", batch, targets, PolicyLoss(), total)).logprobs is None

    async def test_settings_of_a_step_are_its_own(self, trainer: Trainer) -> None:
        """A step with settings equals that of a slot that has them; the next one has the slot's again."""
        decay, ends = Optimizer(weight_decay=0.5, betas=(0.5, 0.9)), []
        for own, given in ((decay, None), (Optimizer(), decay)):
            await trainer.open("a", spec_for(trainer, optimizer=own))
            await accumulate(trainer, "a", random_batch(5))
            await trainer.optim_step("a", 0.1, 1.0, given)
            ends.append(flat(await trainer.export("a")))
            await trainer.optim_step("a", 0.1, 1.0, Optimizer())
            ends.append(flat(await trainer.export("a")))
            await trainer.close("a")
        assert self.same(trainer, ends[0], ends[2])
        assert self.same(trainer, ends[1], ends[3])
        assert not self.same(trainer, ends[0], ends[1])

    async def test_loraplus_gives_b_a_rate_of_its_own(self, trainer: Trainer, start: Path) -> None:
        ends = []
        for lr, ratio in ((2**-10, 1.0), (2**-6, 1.0), (2**-10, 16.0)):
            optimizer = Optimizer(weight_decay=0.1, loraplus_lr_ratio=ratio)
            await trainer.open("a", spec_for(trainer, source=start, optimizer=optimizer))
            await accumulate(trainer, "a", random_batch(5))
            await trainer.optim_step("a", lr, 1.0)
            ends.append((await trainer.export("a")).tensors)
            await trainer.close("a")
        for name, tensor in ends[2].items():
            is_b = "lora_B" in name
            assert self.same(trainer, tensor, ends[is_b][name])
            assert not np.array_equal(tensor, ends[not is_b][name])

    async def test_a_step_clears_the_gradients(self, trainer: Trainer) -> None:
        await open_trained(trainer, "a")
        assert (await trainer.optim_step("a", 1e-2, 1.0)).grad_norm == 0

    async def test_discarded_gradients_are_gone(self, trainer: Trainer) -> None:
        await open_trained(trainer, "a")
        await accumulate(trainer, "a", random_batch(5))
        await trainer.discard_grads("a")
        assert (await trainer.optim_step("a", 1e-2, 1.0)).grad_norm == 0

    async def test_a_step_at_rate_zero_changes_no_weight(self, trainer: Trainer) -> None:
        await open_trained(trainer, "a", optimizer=Optimizer(weight_decay=0.1))
        before = await trainer.export("a")
        _, result = (await train(trainer, "a", range(5, 6), lr=0.0))[0]
        assert result.applied and result.grad_norm > 0
        assert (await trainer.export("a")).digest() == before.digest()

    async def test_weight_decay_shrinks_weights_without_gradients(self, trainer: Trainer) -> None:
        await trainer.open("a", spec_for(trainer, optimizer=Optimizer(weight_decay=0.5)))
        before = flat(await trainer.export("a"))
        await trainer.optim_step("a", 0.1, 1.0)
        np.testing.assert_allclose(flat(await trainer.export("a")), 0.95 * before, rtol=1e-5)

    async def test_nonfinite_loss_can_be_discarded(self, trainer: Trainer) -> None:
        batch = random_batch(5)
        for slot in ("healthy", "poisoned"):
            await open_trained(trainer, slot)
        poison = np.where(np.arange(batch.completions.size) == 0, np.nan, 1.0).astype(np.float32)
        stats = await accumulate(
            trainer, "poisoned", batch, advantages=targets_for(batch).advantages * poison
        )
        assert not np.isfinite(stats.loss)
        await trainer.discard_grads("poisoned")
        for slot in ("healthy", "poisoned"):
            await train(trainer, slot, range(6, 8))
        assert self.same(
            trainer, flat(await trainer.export("healthy")), flat(await trainer.export("poisoned"))
        )

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    async def test_gradients_that_are_not_finite_are_not_applied(
        self, trainer: Trainer, poison: float
    ) -> None:
        batch = random_batch(5)
        for slot in ("healthy", "poisoned"):
            await open_trained(trainer, slot)
        before = await trainer.export("poisoned")
        await accumulate(
            trainer, "poisoned", batch, advantages=targets_for(batch).advantages * np.float32(poison)
        )
        result = await trainer.optim_step("poisoned", 1e-2, 1.0)
        assert not result.applied and not np.isfinite(result.grad_norm)
        assert (await trainer.export("poisoned")).digest() == before.digest()
        for slot in ("healthy", "poisoned"):
            await train(trainer, slot, range(6, 8))
        assert self.same(
            trainer, flat(await trainer.export("healthy")), flat(await trainer.export("poisoned"))
        )
