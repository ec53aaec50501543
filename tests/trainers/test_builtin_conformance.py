"""The builtin trainer keeps the rules of every trainer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.trainers.base import Trainer
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.conformance.reference import VOCAB
from tests.conformance.trainer_kit import MakeTrainer
from tests.conformance.trainer_many import Many
from tests.conformance.trainer_suite import TrainerSuite
from tests.models.test_families import make_model


class OneByOne(BuiltinTrainer):
    """Slots share no pass: the protocol's own way with several of them."""

    forward_backward_many = Trainer.forward_backward_many


class TestBuiltinTrainer(TrainerSuite):
    kind: type[BuiltinTrainer] = BuiltinTrainer

    @pytest.fixture
    def make_trainer(self, base: Path) -> Iterator[MakeTrainer]:
        threads: list[Compute] = []

        async def make() -> Trainer:
            threads.append(Compute())
            return self.kind(load_base(base, torch.float32, torch.device("cpu")), threads[-1], str(base))

        yield make
        for compute in threads:
            compute.close()


class TestSlotsOneByOne(Many):
    kind = OneByOne
    make_trainer = TestBuiltinTrainer.make_trainer


class TestMixtureOfExperts(TestBuiltinTrainer):
    """Adapters on the attention of layers with experts, which are frozen."""

    finite_step = 1e-3  # a larger one sends tokens to other experts

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("moe")
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
        make_model(directory, "qwen3_moe", vocab_size=VOCAB, tie_word_embeddings=True, **sizes)
        return directory
