"""The builtin trainer keeps the rules of every trainer."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lorad.models import base as models
from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.trainers.base import Trainer
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.conformance.reference import with_biases, write_random_model
from tests.conformance.trainer_checkpoints import Checkpoints
from tests.conformance.trainer_critics import Critics
from tests.conformance.trainer_dora import Dora
from tests.conformance.trainer_expert_ranks import ExpertRanks
from tests.conformance.trainer_experts import (
    Glm4Moe,
    GptOss,
    Mixtral,
    MixtureOfExperts,
    Olmoe,
    Qwen2Moe,
    write_mixture,
)
from tests.conformance.trainer_kit import MakeTrainer
from tests.conformance.trainer_many import Many
from tests.conformance.trainer_masks import Masks
from tests.conformance.trainer_routes import ReplayedRoutes
from tests.conformance.trainer_suite import Base, OfLosses, Rest, TrainerSuite
from tests.models.bases import write_hybrid


class OneByOne(BuiltinTrainer):
    """Slots share no pass: the protocol's own way with several of them."""

    forward_backward_many = Trainer.forward_backward_many


@cache
def _loaded(directory: Path) -> models.Base:
    """Return a base that all trainers of it share: nobody writes to its weights."""
    return load_base(directory, torch.float32, torch.device("cpu"))


class TestBuiltinTrainer(TrainerSuite):
    kind: type[BuiltinTrainer] = BuiltinTrainer

    @pytest.fixture
    def make_trainer(self, base: Path) -> Iterator[MakeTrainer]:
        threads: list[Compute] = []

        async def make() -> Trainer:
            threads.append(Compute())
            return self.kind(_loaded(base), threads[-1], str(base))

        yield make
        for compute in threads:
            compute.close()


@pytest.mark.system
class TestHybrid(Base):
    """Gated delta nets beside gated attention; gradients of up to 8."""

    kind = BuiltinTrainer
    make_trainer = TestBuiltinTrainer.make_trainer
    close_to = 5e-5

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("hybrid")
        write_hybrid(directory, alone=True, tie_word_embeddings=True)
        return directory


class _ShortHybrid:
    """One layer of each kind."""

    kind = BuiltinTrainer
    make_trainer = TestBuiltinTrainer.make_trainer
    close_to = 5e-5

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("hybrid")
        kinds = ["linear_attention", "full_attention"]
        sizes: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": kinds, "tie_word_embeddings": True}
        write_hybrid(directory, alone=True, **sizes)
        return directory


@pytest.mark.system
class TestMasksOfHybrid(_ShortHybrid, Masks):
    pass


@pytest.mark.long
class TestRestOfHybrid(_ShortHybrid, Checkpoints, Critics, OfLosses):
    """`TestBuiltinTrainer` has them in `make test`, of a mixture `TestRestOfMixture` in CI."""


class TestDora(Dora):
    kind = BuiltinTrainer
    make_trainer = TestBuiltinTrainer.make_trainer


class TestDoraWithBiases(TestDora):
    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("biased")
        write_random_model(directory, tie_word_embeddings=False, attention_bias=True)
        with_biases(directory)
        return directory


class TestSlotsOneByOne(Many):
    kind = OneByOne
    make_trainer = TestBuiltinTrainer.make_trainer


class TestMixtureOfExperts(MixtureOfExperts, ExpertRanks, ReplayedRoutes, Base):
    kind = BuiltinTrainer
    make_trainer = TestBuiltinTrainer.make_trainer


class _WholeMixture:
    kind = BuiltinTrainer
    make_trainer = TestBuiltinTrainer.make_trainer

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_mixture(tmp_path_factory.mktemp("moe"))


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
class TestRestOfMixture(_WholeMixture, Rest):
    pass


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
class TestLossesOfMixture(_WholeMixture, OfLosses):
    """`TestBuiltinTrainer` has them in `make test`."""


class _OtherMixture:
    kind = BuiltinTrainer
    make_trainer = TestBuiltinTrainer.make_trainer


class TestQwen2Moe(_OtherMixture, Qwen2Moe):
    pass


class TestOlmoe(_OtherMixture, Olmoe):
    pass


class TestMixtral(_OtherMixture, Mixtral):
    pass


class TestGlm4Moe(_OtherMixture, Glm4Moe):
    pass


class TestGptOss(_OtherMixture, GptOss):
    pass


class TestQwen3Next(_OtherMixture, Qwen2Moe):
    """Gated delta nets, whose linears have what belongs to a key head side by side."""

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("hybrid")
        write_hybrid(directory, family="qwen3_next", tie_word_embeddings=True, num_experts=8)
        return directory


class TestRoutesOfQwen3Next(_OtherMixture, ReplayedRoutes):
    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("hybrid")
        kinds = ["linear_attention", "full_attention"]
        sizes: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": kinds, "tie_word_embeddings": True}
        write_hybrid(directory, family="qwen3_next", **sizes)
        return directory


class TestRoutesOfGptOss(_OtherMixture, ReplayedRoutes):
    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_mixture(tmp_path_factory.mktemp("moe"), "gpt_oss", num_local_experts=4)
