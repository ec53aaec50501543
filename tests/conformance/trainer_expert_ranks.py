"""What trainers keep that adapt experts at a rank of their own, on the mixture of `MixtureOfExperts`."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lorad.errors import AdapterRefused, IntegrityError
from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.trainers.base import Policy, Trainer
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.conformance.expert_weights import merge
from tests.conformance.reference import random_batch, reference_logprobs, reference_model
from tests.conformance.trainer_experts import gradient_of_merged
from tests.conformance.trainer_kit import (
    MakeTrainer,
    TrainerCase,
    flat,
    open_trained,
    saved,
    spec_for,
    train,
)

SETTINGS = [{"expert_rank": 2}, {"expert_rank": 6, "rslora": True}]


class ExpertRanks(TrainerCase):
    @pytest.mark.parametrize("settings", SETTINGS, ids=["lower", "higher-rslora"])
    async def test_experts_of_another_rank_equal_merged_weights(
        self, trainer: Trainer, base: Path, settings: dict[str, object]
    ) -> None:
        await open_trained(trainer, "a", **settings)
        adapter, model, batch = await trainer.export("a"), reference_model(base), random_batch(5)
        for module in adapter.config.modules:
            rank = settings["expert_rank"] if ".experts." in module else 4
            assert adapter.tensors[f"{module}.lora_A.weight"].shape[0] == rank
        merge(model, adapter)
        with torch.no_grad():
            expected = reference_logprobs(model, batch).numpy()
        assert abs(await trainer.logprobs(Policy("a"), batch) - expected).max() < 1e-4

    @pytest.mark.parametrize("settings", SETTINGS, ids=["lower", "higher-rslora"])
    async def test_their_gradient_is_that_of_merged_weights(
        self, trainer: Trainer, base: Path, settings: dict[str, object]
    ) -> None:
        expected, found = await gradient_of_merged(trainer, base, **settings)
        assert found == pytest.approx(expected, rel=1e-3)

    async def test_their_slot_continues_bit_for_bit(
        self, trainer: Trainer, make_trainer: MakeTrainer, tmp_path: Path
    ) -> None:
        await open_trained(trainer, "a", expert_rank=2)
        directory = await saved(trainer, "a", tmp_path / "middle")
        await train(trainer, "a", range(3, 5))
        fresh = await make_trainer()
        await fresh.open("b", spec_for(fresh, expert_rank=2, seed=4))
        await fresh.load("b", directory)
        await train(fresh, "b", range(3, 5))
        ends = [await saved(*end) for end in ((trainer, "a", tmp_path / "x"), (fresh, "b", tmp_path / "y"))]
        self.assert_same_files(trainer, *ends)

    async def test_checkpoints_move_to_the_builtin_trainer(
        self, trainer: Trainer, builtin: Trainer, tmp_path: Path
    ) -> None:
        """And back: there they are trained as here."""
        await open_trained(trainer, "a", expert_rank=2)
        there = await saved(trainer, "a", tmp_path / "there")
        await builtin.open("b", spec_for(builtin, expert_rank=2))
        await builtin.load("b", there)
        await train(builtin, "b", range(3, 5))
        back = await saved(builtin, "b", tmp_path / "back")
        await train(trainer, "a", range(3, 5))
        apart = np.abs(flat(await trainer.export("a")) - flat(await builtin.export("b"))).max()
        assert apart < 1e-3
        await trainer.load("a", back)
        assert (await trainer.export("a")).digest() == (await builtin.export("b")).digest()

    async def test_another_rank_of_experts_is_refused(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_trained(trainer, "a", expert_rank=2)
        directory = await saved(trainer, "a", tmp_path / "a")
        await trainer.open("b", spec_for(trainer))
        with pytest.raises(IntegrityError, match="wrong shape"):
            await trainer.load("b", directory)
        with pytest.raises(AdapterRefused, match="its rank of experts is 2, the slot's 4") as refused:
            await trainer.open("c", spec_for(trainer, source=directory))
        assert "lora.experts.rank" in refused.value.hint

    @pytest.fixture
    async def builtin(self, base: Path) -> AsyncIterator[Trainer]:
        compute = Compute()
        yield BuiltinTrainer(load_base(base, torch.float32, torch.device("cpu")), compute, str(base))
        compute.close()
