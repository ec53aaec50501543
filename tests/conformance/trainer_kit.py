"""What the trainer suites share: a model, batches, slots, and the fixtures that a backend gives.

Gradients are not part of the protocol: they are seen through their norm and through the step of an optimizer
whose `eps` dwarfs them: with `PLAIN` at the rate `PLAIN.eps` a step subtracts the gradient.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.protocol.batch import Batch, Gradients, LossStats, Optimizer, PolicyLoss, PolicyTargets
from lorad.protocol.calls import StepResult
from lorad.trainers.base import Policy, SlotSpec, Trainer
from tests.conformance.reference import random_batch, write_random_model

MakeTrainer = Callable[[], Awaitable[Trainer]]
PLAIN = Optimizer(betas=(0.0, 0.0), eps=1e6)
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
    advantages = np.repeat(advantages, batch.completion_lengths)
    return PolicyTargets(advantages, rng.normal(-3, 1, batch.completions.size).astype(np.float32))


async def accumulate(trainer: Trainer, slot: str, batch: Batch, **changes: object) -> Gradients:
    targets = msgspec.structs.replace(targets_for(batch), **changes)
    return await trainer.forward_backward(slot, batch, targets, PolicyLoss(), float(batch.completions.size))


async def train(
    trainer: Trainer, slot: str, seeds: range, lr: float = 1e-2
) -> list[tuple[LossStats, StepResult]]:
    """One optimizer step for each seed."""
    return [
        (await accumulate(trainer, slot, random_batch(seed)), await trainer.optim_step(slot, lr, 1.0))
        for seed in seeds
    ]


async def open_trained(trainer: Trainer, slot: str, **settings: object) -> None:
    """A slot whose A and B both get gradients: B is not zero any more."""
    await trainer.open(slot, spec_for(trainer, **settings))
    await train(trainer, slot, range(2))


def flat(adapter: Adapter) -> np.ndarray:
    return np.concatenate([adapter.tensors[name].ravel() for name in sorted(adapter.tensors)])


async def saved(trainer: Trainer, slot: str, directory: Path) -> Path:
    names = await trainer.save(slot, new_directory(directory))
    assert sorted(names) == file_names(directory)
    return directory


def new_directory(directory: Path) -> Path:
    directory.mkdir()
    return directory


def file_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def optimizer_file(directory: Path) -> Path:
    """The file with the most tensors: two moments for each of the adapter's."""
    return max(directory.glob("*.safetensors"), key=lambda path: len(load_file(path)))


class TrainerCase:
    """A backend overrides `make_trainer`.

    close_to: the most that equal calls on unequal shapes may differ. one_sided_targets: whether q without k
    and v, or up without gate, can be trained; a backend that can not refuses them.
    """

    close_to = 1e-5
    one_sided_targets = True

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        assert file_names(left) == file_names(right)
        for path in left.glob("*.safetensors"):
            ours, theirs = load_file(path), load_file(right / path.name)
            assert ours.keys() == theirs.keys()
            assert [name for name in ours if not self.same(trainer, ours[name], theirs[name])] == []
