"""Rows in which an environment wrote some tokens: they are as the rows of each turn, and cost less."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from lorad.driver.train import sequence_log_ratios
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets
from lorad.spec.algorithm import Ratio
from lorad.trainers.base import Policy, Trainer
from tests.conformance.trainer_gradients import OnPlain

_TURNS = ((4, 3, 5, 2), (2, 4, 1), (6,))
"""Tokens of each sample: sampled, written by the environment, sampled, …"""


def episodes(seed: int = 0) -> tuple[Batch, Batch]:
    """(a row for each episode, a row for each turn), with the same targets in the same order."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, 50, count).astype(np.int32)

    whole, split, sampled = [], [], []
    for prompt in (tokens(5), tokens(3)):
        rows = []
        for lengths in _TURNS:
            runs = [tokens(length) for length in lengths]
            rows.append(np.concatenate(runs))
            sampled.append(np.repeat(np.arange(len(runs)) % 2 == 0, lengths))
            split += [(np.concatenate([prompt, *runs[:i]]), [runs[i]]) for i in range(0, len(runs), 2)]
        whole.append((prompt, rows))
    return Batch.of(whole, sampled), Batch.of(split)


def targets_of(batch: Batch) -> PolicyTargets:
    rng = np.random.default_rng(1)
    advantages, reference, sampler = rng.normal(0, 1, (3, batch.targets.size)).astype(np.float32)
    return PolicyTargets(
        advantages, sampler_logprobs=sampler - 4, reference_logprobs=reference - 4, weights=np.abs(reference)
    )


class Masks(OnPlain):
    async def test_masked_rows_score_like_split_rows(self, trainer: Trainer, start: Path) -> None:
        whole, split = episodes()
        assert whole.targets.tolist() == split.completions.tolist()
        for budget in (16384, 12):
            await self.open_plain(trainer, start, tokens_per_microbatch=budget)
            ours, theirs = [await trainer.logprobs(Policy("plain"), batch) for batch in (whole, split)]
            np.testing.assert_allclose(ours, theirs, atol=self.close_to)
            await trainer.close("plain")

    @pytest.mark.parametrize("budget", [16384, 12])
    async def test_masked_rows_train_like_split_rows(
        self, trainer: Trainer, start: Path, budget: int
    ) -> None:
        loss = PolicyLoss(kl_coef=0.1, entropy_coef=0.1, importance_cap=2.0, returns_logprobs=True)
        found = []
        for batch in episodes():
            await self.open_plain(trainer, start, tokens_per_microbatch=budget)
            stats = await trainer.forward_backward("plain", batch, targets_of(batch), loss, 7.0)
            assert stats.tokens == batch.targets.size
            assert stats.logprobs is not None and stats.logprobs.size == batch.targets.size
            found.append((stats.loss, await self.gradient(trainer, "plain")))
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-3, abs=1e-4)
        np.testing.assert_allclose(found[0][1], found[1][1], atol=self.close_to)

    async def test_wrong_masks_are_refused(self, trainer: Trainer, start: Path) -> None:
        whole, _ = episodes()
        await self.open_plain(trainer, start)
        assert whole.sampled is not None
        none = np.where(np.arange(whole.sampled.size) < sum(_TURNS[0]), False, whole.sampled)
        for sampled in (whole.sampled[1:], whole.sampled.astype(np.uint8), none):
            with pytest.raises(ValueError, match="sampled"):
                await trainer.logprobs(Policy("plain"), msgspec.structs.replace(whole, sampled=sampled))
        with pytest.raises(ValueError, match="numbers for"):
            await trainer.forward_backward(
                "plain", whole, PolicyTargets(np.ones(whole.completions.size)), PolicyLoss("linear"), 1.0
            )


class Ratios(OnPlain):
    """Those of whole samples, in such rows."""

    async def test_ratios_of_samples_leave_out_told_tokens(self, trainer: Trainer, start: Path) -> None:
        """The ratio of a sample is that of its sampled tokens, in their number."""
        whole, _ = episodes()
        loss, advantages = PolicyLoss(ratio="sequence"), np.ones(whole.targets.size, np.float32)
        await self.open_plain(trainer, start)
        now = await trainer.logprobs(Policy("plain"), whole)
        lengths = whole.target_lengths
        moved = np.repeat(np.linspace(-0.3, 0.3, lengths.size), lengths).astype(np.float32)
        targets = PolicyTargets(advantages, now, old_logprobs=now - moved)
        stats = await trainer.forward_backward("plain", whole, targets, loss, 1.0)
        assert stats.ratio == pytest.approx(float(np.exp(moved).sum()), rel=1e-3)
        assert stats.clipped == pytest.approx(float((np.exp(moved) > 1.2).sum()))

    @pytest.mark.parametrize(("ratio", "budget"), [("sequence", 16384), ("geometric", 12)])
    async def test_ratios_of_samples_of_several_rows_are_given(
        self, trainer: Trainer, start: Path, ratio: Ratio, budget: int
    ) -> None:
        """A row for each turn trains as one row does, once it is given the ratio of the whole."""
        loss, found = PolicyLoss(ratio=ratio, clip_low=0.1, clip_high=0.1), []
        whole, split = episodes()
        await self.open_plain(trainer, start, tokens_per_microbatch=budget)
        now = await trainer.logprobs(Policy("plain"), whole)
        rng = np.random.default_rng(2)
        old = now - rng.normal(0, 0.2, now.size).astype(np.float32)
        advantages = np.repeat([1, -1, 1, -1, 1, -1], whole.target_lengths).astype(np.float32)
        targets = PolicyTargets(advantages, now, old_logprobs=old)
        given = sequence_log_ratios(now, old, targets, loss, whole.target_lengths)
        assert np.unique(given).size == whole.target_lengths.size < split.target_lengths.size
        with_ratios = msgspec.structs.replace(targets, sequence_log_ratios=given)
        await trainer.close("plain")
        for batch, what in ((whole, targets), (split, with_ratios), (split, targets)):
            await self.open_plain(trainer, start, tokens_per_microbatch=budget)
            stats = await trainer.forward_backward("plain", batch, what, loss, 7.0)
            found.append((stats.loss, stats.ratio, stats.clipped, await self.gradient(trainer, "plain")))
        assert found[1][:3] == pytest.approx(found[0][:3], rel=1e-3, abs=1e-4)
        np.testing.assert_allclose(found[1][3], found[0][3], atol=self.close_to)
        assert found[2][1] != pytest.approx(found[0][1], rel=1e-3)
