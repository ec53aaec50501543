"""Labels that are not the next tokens, and Tinker's losses on them."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets
from lorad.protocol.calls import ForwardBackward
from lorad.tinker.losses import NEEDS, check, policy_of
from lorad.trainers.base import Policy, Trainer
from tests.conformance.reference import random_batch
from tests.conformance.trainer_gradients import OnPlain
from tests.conformance.trainer_kit import PLAIN, spec_for
from tests.tinker.by_hand import by_hand

_LENGTHS = np.array([5, 1, 7, 2])


def labelled(seed: int = 0) -> Batch:
    """Datums of Tinker: all of their tokens are read, and each has a label of its own."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, 50, size).astype(np.int32) for size in _LENGTHS]
    batch = Batch.of([(one[:1], [np.append(one[1:], 0)]) for one in tokens])
    return msgspec.structs.replace(batch, labels=rng.integers(0, 50, _LENGTHS.sum()).astype(np.int32))


def inputs_of(logprobs: np.ndarray) -> dict[str, np.ndarray]:
    """Log-probabilities of a sampler that is near in part, so that some ratios are clipped."""
    rng = np.random.default_rng(1)
    mask = (rng.random(logprobs.size) < 0.8).astype(np.float32)
    near = logprobs - np.where(rng.random(logprobs.size) < 0.5, rng.normal(0, 0.5, logprobs.size), 0)
    advantages = rng.normal(size=logprobs.size) * mask
    made = {"weights": advantages, "logprobs": near, "advantages": advantages, "sequence_ratio_mask": mask}
    return {key: value.astype(np.float32) for key, value in made.items()}


class Labels(OnPlain):
    async def test_labels_are_scored_in_place_of_next_tokens(self, trainer: Trainer, start: Path) -> None:
        """Each label has the log-probability that it has as the next token behind what was read."""
        batch, place = labelled(), 0
        assert batch.labels is not None
        await self.open_plain(trainer, start)
        found = await trainer.logprobs(Policy("plain"), batch)
        for prompt, completions in batch.groups():
            read = np.concatenate([prompt, completions[0][:-1]])
            for end in range(1, read.size + 1):
                alone = Batch.of([(read[:end], [batch.labels[place : place + 1]])])
                expected = await trainer.logprobs(Policy("plain"), alone)
                np.testing.assert_allclose(found[place], expected[0], atol=self.close_to)
                place += 1

    @pytest.mark.parametrize("budget", [16384, 1])
    @pytest.mark.parametrize("name", NEEDS)
    async def test_losses_of_tinker_are_those_by_hand(
        self, trainer: Trainer, start: Path, name: str, budget: int
    ) -> None:
        batch = labelled()
        await self.open_plain(trainer, start, tokens_per_microbatch=budget)
        now = await trainer.logprobs(Policy("plain"), batch)
        given = inputs_of(now)
        checked = check(name, {}, {key: given[key] for key in NEEDS[name]}, now.size)
        loss, targets = policy_of(name, {}, checked)
        stats = await trainer.forward_backward("plain", batch, targets, loss, 1.0)
        gradient = await self.gradient(trainer, "plain")
        ends = np.cumsum(_LENGTHS)[:-1]
        columns = (now, given["logprobs"], given["advantages"], given["sequence_ratio_mask"])
        datums = zip(*(np.split(column.astype(np.float64), ends) for column in columns), strict=True)
        values, slopes = zip(*(by_hand(name, *datum) for datum in datums), strict=True)
        assert stats.loss == pytest.approx(sum(values), rel=1e-3, abs=1e-4)
        assert stats.logprobs is not None
        np.testing.assert_allclose(stats.logprobs, now, atol=self.close_to)
        await self.open_plain(trainer, start)
        linear = PolicyTargets(-np.concatenate(slopes).astype(np.float32))
        await trainer.forward_backward("plain", batch, linear, PolicyLoss("linear"), 1.0)
        np.testing.assert_allclose(
            gradient, await self.gradient(trainer, "plain"), atol=self.close_to, rtol=1e-5
        )

    async def test_labels_share_passes_with_other_batches(self, trainer: Trainer, start: Path) -> None:
        """Slots with labels and one without: each as in a call of its own."""
        works = [
            *(self.work(slot, labelled(seed)) for slot, seed in (("a", 1), ("b", 2))),
            self.work("c", random_batch(3)),
        ]
        found = []
        for is_joint in (True, False):
            for work in works:
                await trainer.open(work.slot, spec_for(trainer, source=start, optimizer=PLAIN))
            if is_joint:
                gradients = await trainer.forward_backward_many(works)
            else:
                gradients = [
                    await trainer.forward_backward(w.slot, w.batch, w.targets, w.loss, w.normaliser)
                    for w in works
                ]
            found.append(
                [
                    (one.logprobs, await self.gradient(trainer, one_of.slot))
                    for one, one_of in zip(gradients, works, strict=True)
                ]
            )
        for ours, theirs in zip(*found, strict=True):
            for left, right in zip(ours, theirs, strict=True):
                assert left is not None and right is not None
                np.testing.assert_allclose(left, right, atol=self.close_to)

    @staticmethod
    def work(slot: str, batch: Batch) -> ForwardBackward:
        targets = PolicyTargets(np.ones(batch.targets.size, np.float32))
        return ForwardBackward(batch, targets, PolicyLoss("linear", returns_logprobs=True), 1.0, slot)

    async def test_a_datum_may_fill_the_context(self, trainer: Trainer, start: Path) -> None:
        await self.open_plain(trainer, start)
        most = trainer.capabilities().max_tokens
        for size in (most, most + 1):
            tokens = np.arange(size, dtype=np.int32) % 50
            batch = Batch.of([(tokens[:1], [np.append(tokens[1:], 0)])])
            batch = msgspec.structs.replace(batch, labels=tokens)
            if size > most:
                with pytest.raises(ValueError, match="exceeds"):
                    await trainer.logprobs(Policy("plain"), batch)
            else:
                found = await trainer.logprobs(Policy("plain"), batch)
                assert found.shape == (size,) and np.isfinite(found).all()

    async def test_wrong_labels_are_refused(self, trainer: Trainer, start: Path) -> None:
        await self.open_plain(trainer, start)
        batch = labelled()
        assert batch.labels is not None
        for labels, words in (
            (batch.labels[1:], "one for each target"),
            (batch.labels.astype(np.float32), "no token ids"),
            (np.full_like(batch.labels, 10**6), "in the labels"),
        ):
            with pytest.raises(ValueError, match=words):
                await trainer.logprobs(Policy("plain"), msgspec.structs.replace(batch, labels=labels))

    async def test_a_step_without_gradients_moves_adam_on(self, trainer: Trainer, start: Path) -> None:
        """Its norm is 0, and the moments of the step before still move the weights."""
        await trainer.open("a", spec_for(trainer, source=start))
        targets = PolicyTargets(np.ones(labelled().targets.size, np.float32))
        await trainer.forward_backward("a", labelled(), targets, PolicyLoss("linear"), 1.0)
        await trainer.optim_step("a", 1e-2, 0.0)
        before = await trainer.export("a")
        stepped = await trainer.optim_step("a", 1e-2, 0.0)
        after = await trainer.export("a")
        assert (stepped.grad_norm, stepped.applied) == (0.0, True)
        assert any(not np.array_equal(before.tensors[name], after.tensors[name]) for name in after.tensors)
