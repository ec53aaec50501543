"""A slot on disk continues exactly where it was saved; a damaged one is refused."""

import re
import shutil
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load_file, save_file

from lorad.adapters.peft import WEIGHTS, read_peft
from lorad.errors import AdapterRefused, IntegrityError
from lorad.protocol.batch import Optimizer
from lorad.trainers.base import Trainer
from tests.conformance.reference import random_batch
from tests.conformance.trainer_kit import (
    MakeTrainer,
    TrainerCase,
    accumulate,
    open_trained,
    optimizer_file,
    saved,
    spec_for,
    train,
)


class Checkpoints(TrainerCase):
    async def test_loaded_slot_continues_bit_for_bit(
        self, trainer: Trainer, make_trainer: MakeTrainer, tmp_path: Path
    ) -> None:
        spec = spec_for(trainer, dropout=0.1, seed=3, optimizer=Optimizer(loraplus_lr_ratio=4.0))
        await trainer.open("a", spec)
        await train(trainer, "a", range(2))
        directory = await saved(trainer, "a", tmp_path / "middle")
        straight = await train(trainer, "a", range(2, 4))
        fresh = await make_trainer()
        await fresh.open("b", msgspec.structs.replace(spec, seed=4))
        await fresh.load("b", directory)
        resumed = await train(fresh, "b", range(2, 4))
        if trainer.capabilities().deterministic:
            assert resumed == straight
        ends = [await saved(*end) for end in ((trainer, "a", tmp_path / "x"), (fresh, "b", tmp_path / "y"))]
        self.assert_same_files(trainer, *ends)

    async def test_a_load_forgets_what_the_slot_was(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_trained(trainer, "a", dropout=0.1)
        first = await saved(trainer, "a", tmp_path / "first")
        await train(trainer, "a", range(5, 7))
        await accumulate(trainer, "a", random_batch(7))
        await trainer.load("a", first)
        self.assert_same_files(trainer, await saved(trainer, "a", tmp_path / "again"), first)
        assert (await trainer.optim_step("a", 0.0, 1.0)).grad_norm == 0

    async def test_loaded_weights_survive_a_step_at_rate_zero(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_trained(trainer, "a")
        digest = (await trainer.export("a")).digest()
        directory = await saved(trainer, "a", tmp_path / "a")
        await trainer.open("b", spec_for(trainer, seed=9))
        await trainer.load("b", directory)
        await train(trainer, "b", range(1), lr=0.0)
        assert (await trainer.export("b")).digest() == digest

    async def test_a_checkpoint_is_a_peft_directory(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_trained(trainer, "a")
        directory = await saved(trainer, "a", tmp_path / "a")
        assert read_peft(directory).digest() == (await trainer.export("a")).digest()

    async def test_nothing_saved_is_pickled(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_trained(trainer, "a")
        directory = await saved(trainer, "a", tmp_path / "a")
        assert {path.suffix for path in directory.iterdir()} <= {".safetensors", ".json"}

    @pytest.mark.parametrize("which", ["optimizer", "adapter"])
    @pytest.mark.parametrize("fault", ["missing", "unexpected", "misshapen"])
    async def test_state_with_other_keys_is_refused(
        self, trainer: Trainer, tmp_path: Path, which: str, fault: str
    ) -> None:
        await open_trained(trainer, "a", dropout=0.1)
        good = await saved(trainer, "a", tmp_path / "good")
        bad = Path(shutil.copytree(good, tmp_path / "bad"))
        path = optimizer_file(bad) if which == "optimizer" else bad / WEIGHTS
        tensors = load_file(path)
        name = next(name for name in sorted(tensors) if "lora_B" in name)
        tensor = tensors.pop(name)
        if fault == "unexpected":
            tensors |= {name: tensor, (name := "unheard.of"): tensor}
        elif fault == "misshapen":
            tensors[name] = tensor[:, :1].copy()
        save_file(tensors, path)
        await self.assert_refused(trainer, bad, good, name)

    async def test_a_missing_file_is_refused(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_trained(trainer, "a", dropout=0.1)
        good = await saved(trainer, "a", tmp_path / "good")
        for path in sorted(good.iterdir()):
            bad = Path(shutil.copytree(good, tmp_path / f"without {path.name}"))
            (bad / path.name).unlink()
            await self.assert_refused(trainer, bad, good, path.name)

    @pytest.mark.parametrize("change", [{"alpha": 64}, {"rslora": True}, {"rank": 8}])
    async def test_a_checkpoint_of_another_adapter_is_refused(
        self, trainer: Trainer, tmp_path: Path, change: dict[str, object]
    ) -> None:
        await open_trained(trainer, "b", **change)
        other = await saved(trainer, "b", tmp_path / "other")
        await open_trained(trainer, "a", dropout=0.1)
        named = "wrong shape" if "rank" in change else f"its {next(iter(change))} is"
        await self.assert_refused(trainer, other, await saved(trainer, "a", tmp_path / "good"), named)

    async def assert_refused(self, trainer: Trainer, bad: Path, good: Path, named: str) -> None:
        """IntegrityError that names the fault; the slot is as it was saved in `good`."""
        with pytest.raises(IntegrityError, match=re.escape(named)):
            await trainer.load("a", bad)
        self.assert_same_files(trainer, await saved(trainer, "a", bad.with_name(f"after {bad.name}")), good)

    async def test_a_slot_can_start_from_a_peft_directory(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_trained(trainer, "a")
        directory = await saved(trainer, "a", tmp_path / "a")
        await trainer.open("b", spec_for(trainer, source=directory))
        assert (await trainer.export("b")).digest() == (await trainer.export("a")).digest()

    @pytest.mark.parametrize(
        "change", [{"rank": 8}, {"alpha": 16}, {"modules": ("model.layers.0.mlp.up_proj",)}]
    )
    async def test_a_start_that_does_not_fit_is_refused(
        self, trainer: Trainer, tmp_path: Path, change: dict[str, object]
    ) -> None:
        await open_trained(trainer, "a")
        directory = await saved(trainer, "a", tmp_path / "a")
        with pytest.raises(AdapterRefused):
            await trainer.open("b", spec_for(trainer, source=directory, **change))
        await trainer.open("b", spec_for(trainer))
