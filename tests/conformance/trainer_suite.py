"""The rules of `lorad.trainers.base`, as tests.

A backend passes when a subclass of `TrainerSuite` with its own `make_trainer` does. Gradients are not part of the
protocol: they are seen through the norm and the step of an optimizer whose `eps` dwarfs them (`PLAIN`), which moves
each weight in proportion to its gradient.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.adapters.peft import WEIGHTS, write_peft
from lorad.errors import AdapterRefused, Conflict, IntegrityError, NotFound
from lorad.protocol.batch import Batch, LossStats, PolicyLoss, PolicyTargets
from lorad.trainers.base import Optimizer, Policy, SlotSpec, StepResult, Trainer
from tests.conformance.reference import random_batch, reference_logprobs, reference_model, write_random_model

MakeTrainer = Callable[[], Awaitable[Trainer]]
PLAIN = Optimizer(betas=(0.0, 0.0), eps=1e3)
BASE = Policy()


def spec_for(trainer: Trainer, **settings: object) -> SlotSpec:
    """An adapter on every linear; keywords override fields of the spec or of its adapter."""
    adapter = AdapterConfig(rank=4, alpha=8, modules=tuple(sorted(trainer.modules())))
    ours = {key: value for key, value in settings.items() if key in AdapterConfig.__struct_fields__}
    rest = {key: value for key, value in settings.items() if key not in ours}
    return msgspec.structs.replace(SlotSpec(adapter=msgspec.structs.replace(adapter, **ours)), **rest)


def targets_for(batch: Batch, seed: int = 0) -> PolicyTargets:
    rng = np.random.default_rng(seed)
    advantages = rng.normal(size=batch.completion_lengths.size).astype(np.float32)
    return PolicyTargets(advantages, rng.normal(-3, 1, batch.completions.size).astype(np.float32))


async def accumulate(trainer: Trainer, slot: str, batch: Batch, **changes: object) -> LossStats:
    targets = msgspec.structs.replace(targets_for(batch), **changes)
    return await trainer.forward_backward(slot, batch, targets, PolicyLoss(), float(batch.completions.size))


async def train(trainer: Trainer, slot: str, seeds: range, lr: float = 1e-2) -> list[tuple[LossStats, StepResult]]:
    """One optimizer step for each seed."""
    return [
        (await accumulate(trainer, slot, random_batch(seed)), await trainer.optim_step(slot, lr, 1.0)) for seed in seeds
    ]


async def open_trained(trainer: Trainer, slot: str, **settings: object) -> None:
    """A slot whose A and B both get gradients: B is not zero any more."""
    await trainer.open(slot, spec_for(trainer, **settings))
    await train(trainer, slot, range(2))


def flat(adapter: Adapter) -> np.ndarray:
    return np.concatenate([adapter.tensors[name].ravel() for name in sorted(adapter.tensors)])


async def saved(trainer: Trainer, slot: str, directory: Path) -> Path:
    directory.mkdir()
    names = await trainer.save(slot, directory)
    assert sorted(names) == sorted(path.name for path in directory.iterdir())
    return directory


def optimizer_file(directory: Path) -> Path:
    """The file with the most tensors: two moments for each of the adapter's."""
    return max(directory.glob("*.safetensors"), key=lambda path: len(load_file(path)))


class TrainerSuite:
    """`close_to` is the most that equal calls on unequal shapes may differ."""

    close_to = 1e-5

    @pytest.fixture(scope="class")
    def base(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_random_model(tmp_path_factory.mktemp("base"))

    @pytest.fixture
    def make_trainer(self, base: Path) -> MakeTrainer:
        """Each call gives a fresh trainer on `base`."""
        raise NotImplementedError("a backend says here how to make its trainer")

    @pytest.fixture
    async def trainer(self, make_trainer: MakeTrainer) -> Trainer:
        return await make_trainer()

    def same(self, trainer: Trainer, left: np.ndarray, right: np.ndarray) -> bool:
        """Bit for bit on a deterministic backend."""
        if trainer.capabilities().deterministic:
            return np.array_equal(left, right)
        return np.allclose(left, right, atol=self.close_to)

    def assert_same_files(self, trainer: Trainer, left: Path, right: Path) -> None:
        assert sorted(p.name for p in left.iterdir()) == sorted(p.name for p in right.iterdir())
        for path in left.glob("*.safetensors"):
            ours, theirs = load_file(path), load_file(right / path.name)
            assert ours.keys() == theirs.keys()
            assert [name for name in ours if not self.same(trainer, ours[name], theirs[name])] == []

    # What the numbers mean

    async def test_base_logprobs_are_those_of_transformers(self, trainer: Trainer, base: Path) -> None:
        batch = random_batch(0)
        expected = reference_logprobs(reference_model(base), batch, temperature=0.7).detach().numpy()
        found = await trainer.logprobs(BASE, batch, temperature=0.7)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-4)

    async def test_a_new_adapter_changes_nothing(self, trainer: Trainer) -> None:
        await trainer.open("new", spec_for(trainer, dropout=0.5))
        policy = await trainer.logprobs(Policy("new"), random_batch(0))
        assert self.same(trainer, policy, await trainer.logprobs(BASE, random_batch(0)))

    async def test_peft_computes_the_same_with_the_export(self, trainer: Trainer, base: Path, tmp_path: Path) -> None:
        await open_trained(trainer, "a")
        write_peft(await trainer.export("a"), tmp_path, str(base))
        expected = reference_logprobs(reference_model(base, tmp_path), random_batch(5)).detach().numpy()
        found = await trainer.logprobs(Policy("a"), random_batch(5))
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert np.abs(found - await trainer.logprobs(BASE, random_batch(5))).max() > 0.01

    async def test_the_gradient_is_that_of_autograd_through_peft(
        self, trainer: Trainer, base: Path, tmp_path: Path
    ) -> None:
        await open_trained(trainer, "a")
        write_peft(await trainer.export("a"), tmp_path, str(base))
        model, batch = reference_model(base, tmp_path), random_batch(5)
        await accumulate(trainer, "a", batch)
        weights = np.repeat(targets_for(batch).advantages, batch.completion_lengths) / batch.completions.size
        logprobs = reference_logprobs(model, batch)
        logprobs.backward(-logprobs.new_tensor(weights))  # type: ignore[no-untyped-call]
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
        weighed = np.repeat(targets_for(batch).advantages, batch.completion_lengths)
        assert stats.loss == pytest.approx(-weighed.mean(), rel=1e-4)

    async def test_training_makes_a_rewarded_sample_likelier(self, trainer: Trainer) -> None:
        await trainer.open("a", spec_for(trainer))
        batch = random_batch(0, groups=1, samples=1)
        before = await trainer.logprobs(Policy("a"), batch)
        for _ in range(3):
            await accumulate(trainer, "a", batch, advantages=np.ones(1, np.float32))
            await trainer.optim_step("a", 1e-2, 0.0)
        assert (await trainer.logprobs(Policy("a"), batch)).sum() > before.sum() + 1

    # What accumulates

    async def gradient(self, trainer: Trainer, slot: str) -> np.ndarray:
        """The accumulated gradient, read off a plain step; the slot is closed."""
        before = flat(await trainer.export(slot))
        await trainer.optim_step(slot, 1e3, 0.0)
        step = before - flat(await trainer.export(slot))
        await trainer.close(slot)
        assert np.abs(step).max() > 1e-3
        return step

    async def open_plain(self, trainer: Trainer, start: Path, **settings: object) -> None:
        await trainer.open("plain", spec_for(trainer, source=start, optimizer=PLAIN, **settings))

    @pytest.fixture
    async def start(self, trainer: Trainer, tmp_path: Path) -> Path:
        """A PEFT directory of a slot after two steps."""
        await open_trained(trainer, "start")
        write_peft(await trainer.export("start"), tmp_path, "")
        return tmp_path

    async def test_halves_accumulate_to_the_whole(self, trainer: Trainer, start: Path) -> None:
        batch = random_batch(5, groups=2)
        await self.open_plain(trainer, start)
        whole_stats = await accumulate(trainer, "plain", batch)
        whole = await self.gradient(trainer, "plain")
        await self.open_plain(trainer, start)
        stats, place, sample = LossStats(), 0, 0
        for group in batch.groups():
            half = Batch.of([group])
            tokens, samples = slice(place, place + half.completions.size), slice(sample, sample + len(group[1]))
            place, sample = tokens.stop, samples.stop
            targets = targets_for(batch)
            part = PolicyTargets(targets.advantages[samples], targets.sampler_logprobs[tokens])
            stats += await trainer.forward_backward("plain", half, part, PolicyLoss(), float(batch.completions.size))
        np.testing.assert_allclose(await self.gradient(trainer, "plain"), whole, atol=self.close_to)
        assert stats.loss == pytest.approx(whole_stats.loss, rel=1e-4)
