"""Every loss of `lorad/rl/loss.py` in a trainer: the golden cases, with gradients in place of derivatives."""

from pathlib import Path

import numpy as np
import pytest

from lorad.protocol.batch import Batch, LossStats, PolicyLoss, PolicyTargets
from lorad.trainers.base import Policy, Trainer
from tests.conformance.goldens import CASES, LENGTHS, POLICIES, given, loss_and_gradient, policy_targets
from tests.conformance.trainer_gradients import Gradients

_ABSOLUTE = ("dft", "dppo_tv", "prime_default", "distill")
"""Cases that look at probabilities themselves, which are others on another model."""


class Losses(Gradients):
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
        for name in POLICIES:
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
