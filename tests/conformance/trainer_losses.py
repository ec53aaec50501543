"""Every loss of `lorad/rl/loss.py` in a trainer: the golden cases, with gradients in place of derivatives."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from lorad.protocol.batch import OF_PAIRS, Batch, LossStats, PolicyLoss, PolicyTargets
from lorad.rl.pairs import preference_loss
from lorad.spec.algorithm import Preference
from lorad.trainers.base import Policy, Trainer
from tests.conformance.goldens import CASES, LENGTHS, POLICIES, given, loss_and_gradient, policy_targets
from tests.conformance.reference import random_batch
from tests.conformance.trainer_gradients import OnPlain

_ABSOLUTE = ("dft", "dppo_tv", "prime_default", "distill")
"""Cases that look at probabilities themselves, which are others on another model."""
PREFERENCES = (Preference(nll=0.2), Preference("ipo"), Preference("simpo"), Preference("kto", beta=0.3))


class Losses(OnPlain):
    """policies: the golden cases, of which a slow backend may have some."""

    policies: ClassVar[Sequence[str]] = tuple(POLICIES)

    async def test_losses_have_the_gradients_of_the_goldens(self, trainer: Trainer, start: Path) -> None:
        """A loss has the gradient of `linear` with its derivatives as coefficients; where ratios are of whole
        samples, also with a micro-batch for each of them.
        """
        draw = np.random.default_rng(0)
        prompts = [draw.integers(0, 50, 4).astype(np.int32) for _ in range(2)]
        samples = [draw.integers(0, 50, size).astype(np.int32) for size in LENGTHS]
        batch = Batch.of([(prompts[0], samples[:2]), (prompts[1], samples[2:])])
        await self.open_plain(trainer, start)
        logprobs = await trainer.logprobs(Policy("plain"), batch)
        await trainer.close("plain")
        for name in self.policies:
            loss, targets, total = policy_targets(name)
            targets = self._shifted(targets, logprobs)
            value, slope = loss_and_gradient(loss, targets, total, logprobs)
            if name not in _ABSOLUTE:
                np.testing.assert_allclose(slope, CASES[name]["grad"], atol=2e-6, err_msg=name)
            linear = PolicyTargets(-slope)
            _, wanted = await self._gradient_of(trainer, start, batch, linear, PolicyLoss("linear"), 1.0)
            for budget in (16384,) if loss.ratio == "token" and name != "grpo" else (16384, 1):
                stats, found = await self._gradient_of(trainer, start, batch, targets, loss, total, budget)
                np.testing.assert_allclose(found, wanted, atol=self.close_to, err_msg=name)
                assert stats.loss == pytest.approx(value, rel=1e-3, abs=1e-4), name

    @pytest.mark.parametrize("wanted", PREFERENCES, ids=lambda wanted: wanted.loss)
    async def test_preferences_have_the_gradients_by_hand(
        self, trainer: Trainer, start: Path, wanted: Preference
    ) -> None:
        """In one pass as in two, with a micro-batch for all pairs, and for each."""
        if OF_PAIRS not in trainer.capabilities().losses:
            pytest.skip("its pairs may lie on several ranks: the caller gives it the derivatives")
        batch = random_batch(3, groups=6, samples=2)
        draw, size = np.random.default_rng(1), batch.completions.size
        reference, trained = draw.normal(-3, 1, size).astype(np.float32), draw.integers(0, 2, size)
        desired = draw.integers(0, 2, 12) > 0
        await self.open_plain(trainer, start)
        logprobs = await trainer.logprobs(Policy("plain"), batch)
        await trainer.close("plain")
        found = preference_loss(logprobs, reference, batch.completion_lengths, wanted, trained, desired, 0.1)
        linear = PolicyTargets(-found.gradient.astype(np.float32))
        _, by_hand = await self._gradient_of(trainer, start, batch, linear, PolicyLoss("linear"), 1.0)
        signs = np.repeat(np.where(desired, 1, -1), batch.completion_lengths).astype(np.float32)
        targets = PolicyTargets(signs, reference_logprobs=reference, weights=trained.astype(np.float32))
        loss = PolicyLoss("preference", preference=wanted, divergence=0.1)
        for budget in (16384, 1):
            total = 12.0 if wanted.loss == "kto" else 6.0
            stats, step = await self._gradient_of(trainer, start, batch, targets, loss, total, budget)
            np.testing.assert_allclose(step, by_hand, atol=self.close_to)
            assert stats.loss == pytest.approx(found.loss, rel=1e-4)

    async def test_a_loss_of_pairs_is_refused_without_pairs(self, trainer: Trainer, start: Path) -> None:
        """A trainer that does not know the loss at all refuses it as well."""
        await self.open_plain(trainer, start)
        batch = random_batch(3, groups=2, samples=3)
        ones = np.ones(batch.completions.size, np.float32)
        loss = PolicyLoss("preference", preference=Preference())
        for targets in (PolicyTargets(ones, reference_logprobs=ones), PolicyTargets(ones)):
            with pytest.raises(ValueError, match=r"a loss of p|does not know surrogate:preference"):
                await trainer.forward_backward("plain", batch, targets, loss, 1.0)
        await trainer.close("plain")

    def _shifted(self, targets: PolicyTargets, logprobs: np.ndarray) -> PolicyTargets:
        """Move the log-probabilities of a case so that those of the trainer stand where the case's own do."""
        by = logprobs - given("logprob")
        moved = {
            name: (array + by * name.endswith("logprobs")).astype(np.float32)
            for name in targets.__struct_fields__
            if (array := getattr(targets, name)) is not None
        }
        return PolicyTargets(**moved)

    async def _gradient_of(
        self,
        trainer: Trainer,
        start: Path,
        batch: Batch,
        targets: PolicyTargets,
        loss: PolicyLoss,
        total: float,
        budget: int = 16384,
    ) -> tuple[LossStats, np.ndarray]:
        await self.open_plain(trainer, start, tokens_per_microbatch=budget)
        stats = await trainer.forward_backward("plain", batch, targets, loss, total)
        return stats, await self.gradient(trainer, "plain")
