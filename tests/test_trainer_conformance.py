"""The builtin trainer keeps the rules of every trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.trainers.base import Trainer
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.conformance.trainer_kit import MakeTrainer
from tests.conformance.trainer_suite import TrainerSuite


class TestBuiltinTrainer(TrainerSuite):
    @pytest.fixture
    def make_trainer(self, base: Path) -> Iterator[MakeTrainer]:
        threads: list[Compute] = []

        async def make() -> Trainer:
            threads.append(Compute())
            return BuiltinTrainer(load_base(base, torch.float32, torch.device("cpu")), threads[-1], str(base))

        yield make
        for compute in threads:
            compute.close()
