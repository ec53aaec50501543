"""The trainer of one rank in the pool's process keeps the rules of every trainer, and lends its base to an
engine that keeps the rules of every engine.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from lorad.engines.base import BASE, Engine
from lorad.engines.generic.engine import TransformersEngine
from lorad.models.compute import Compute
from lorad.models.directory import resolve
from lorad.models.facts import read_facts
from lorad.trainers.base import Policy, Trainer
from lorad.trainers.fsdp.in_process import FusedTrainer
from lorad.trainers.sharded.body import BodySettings
from tests.conformance.engine_suite import CANARY, Answers, Traffic
from tests.conformance.trainer_checkpoints import Checkpoints
from tests.conformance.trainer_critics import Critics
from tests.conformance.trainer_kit import MakeTrainer, open_trained
from tests.conformance.trainer_masks import Masks
from tests.conformance.trainer_suite import Base, OfLosses
from tests.kit.fakes.random_adapters import Shapes

TINY = resolve("builtin:tiny")


def settings_of(base: Path) -> BodySettings:
    return BodySettings(model=str(base), dtype="float32", device="cpu", whole=True)


class TestFusedTrainer(Base):
    @pytest.fixture
    async def make_trainer(self, base: Path) -> AsyncIterator[MakeTrainer]:
        trainers: list[tuple[Compute, Trainer]] = []

        async def make() -> Trainer:
            compute = Compute()
            trainers.append((compute, await FusedTrainer.start(compute, settings_of(base), str(base))))
            return trainers[-1][1]

        yield make
        for compute, trainer in trainers:
            await trainer.shut_down()
            compute.close()


@pytest.mark.system
class TestCheckpointsOfFusedTrainer(Checkpoints):
    make_trainer = TestFusedTrainer.make_trainer


@pytest.mark.long
class TestLossesOfFusedTrainer(OfLosses, Masks, Critics):
    """Which the same body computes as processes: `TestFsdpTwoRanks` has them in CI."""

    make_trainer = TestFusedTrainer.make_trainer


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Trainer, Engine]]:
    """A trainer with an adapter of its own in the base all the time, and the engine on that base."""
    compute = Compute()
    trainer = await FusedTrainer.start(compute, settings_of(TINY), "tiny")
    engine = TransformersEngine.on(
        trainer.body, compute, TINY, read_facts(TINY).linears, lambda _: 1 << 28, mix_calls=False
    )
    await open_trained(trainer, "run")
    yield trainer, engine
    await engine.close()
    await trainer.shut_down()
    compute.close()


async def test_a_trained_slot_does_not_act_in_samples(pair: tuple[Trainer, Engine]) -> None:
    trainer, engine = pair
    trained = await trainer.logprobs(Policy("run"), CANARY)
    sampled = await engine.score(BASE, CANARY)
    base = await trainer.logprobs(Policy(), CANARY)
    assert np.abs(sampled - base).max() < 1e-5 < 1e-3 < np.abs(sampled - trained).max()
    assert np.array_equal(trained, await trainer.logprobs(Policy("run"), CANARY))


class _OnTheSameBase:
    @pytest.fixture
    def engine(self, pair: tuple[Trainer, Engine]) -> Engine:
        return pair[1]

    @pytest.fixture
    def shapes(self) -> Shapes:
        return read_facts(TINY).linears


@pytest.mark.system
class TestEngineOnTheSameBase(_OnTheSameBase, Answers):
    pass


@pytest.mark.long
class TestTrafficOnTheSameBase(_OnTheSameBase, Traffic):
    """The engine's own, on whatever base: tests/engines/generic has it in CI."""
