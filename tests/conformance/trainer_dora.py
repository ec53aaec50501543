"""DoRA: magnitudes are trained, kept and exported; PEFT's own module is the judge."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lorad.adapters.adapter import MAGNITUDE
from lorad.adapters.peft import read_peft, write_peft
from lorad.errors import AdapterRefused, IntegrityError
from lorad.trainers.base import Policy, Trainer
from tests.conformance.reference import random_batch, reference_logprobs, reference_model
from tests.conformance.trainer_kit import (
    BASE,
    PLAIN,
    MakeTrainer,
    TrainerCase,
    accumulate,
    flat,
    open_trained,
    saved,
    spec_for,
    targets_for,
    train,
)

_CLOSE = 1e-5


class Dora(TrainerCase):
    """On any base with linears beside experts, q, k and v among them."""

    async def test_dora_begins_as_the_base(self, trainer: Trainer) -> None:
        await trainer.open("a", spec_for(trainer, dora=True))
        found = await trainer.logprobs(Policy("a"), random_batch(0))
        np.testing.assert_allclose(found, await trainer.logprobs(BASE, random_batch(0)), atol=_CLOSE)

    @pytest.mark.parametrize("rslora", [False, True])
    async def test_peft_computes_dora_alike(
        self, trainer: Trainer, base: Path, tmp_path: Path, rslora: bool
    ) -> None:
        await trainer.open("a", spec_for(trainer, dora=True, rslora=rslora))
        before = (await trainer.export("a")).tensors
        await train(trainer, "a", range(4))
        exported = await trainer.export("a")
        moved = {name: np.abs(exported.tensors[name] - array).max() for name, array in before.items()}
        assert min(moved.values()) > 1e-3 and sum(MAGNITUDE in name for name in moved) == len(moved) // 3
        write_peft(exported, tmp_path, str(base))
        expected = reference_logprobs(reference_model(base, tmp_path), random_batch(5)).detach().numpy()
        found = await trainer.logprobs(Policy("a"), random_batch(5))
        np.testing.assert_allclose(found, expected, atol=_CLOSE)
        assert read_peft(tmp_path).digest() == exported.digest()

    async def test_gradients_of_dora_are_pefts(self, trainer: Trainer, base: Path, tmp_path: Path) -> None:
        some = tuple(m for m in sorted(trainer.modules()) if not m.endswith(("k_proj", "up_proj")))
        some = some if self.one_sided_targets else tuple(sorted(trainer.modules()))
        await open_trained(trainer, "a", dora=True, modules=some)
        write_peft(await trainer.export("a"), tmp_path, str(base))
        spec = spec_for(trainer, dora=True, modules=some, source=tmp_path, optimizer=PLAIN)
        await trainer.open("plain", spec)
        before, batch = (await trainer.export("plain")).tensors, random_batch(5)
        await accumulate(trainer, "plain", batch)
        await trainer.optim_step("plain", PLAIN.eps, 0.0)
        after = (await trainer.export("plain")).tensors
        model = reference_model(base, tmp_path)
        logprobs = reference_logprobs(model, batch)
        logprobs.backward(-logprobs.new_tensor(targets_for(batch).advantages / batch.completions.size))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                plain = name.replace(".default", "").removeprefix("base_model.model.")
                plain = plain.replace(f"{MAGNITUDE}.weight", MAGNITUDE)
                ours = torch.from_numpy(before[plain] - after[plain])
                torch.testing.assert_close(ours, parameter.grad, atol=_CLOSE, rtol=1e-4)

    async def test_loaded_dora_continues_bit_for_bit(
        self, trainer: Trainer, make_trainer: MakeTrainer, tmp_path: Path
    ) -> None:
        await open_trained(trainer, "a", dora=True)
        directory = await saved(trainer, "a", tmp_path / "a")
        await train(trainer, "a", range(3, 5))
        fresh = await make_trainer()
        await fresh.open("b", spec_for(fresh, dora=True, seed=9))
        await fresh.load("b", directory)
        await train(fresh, "b", range(3, 5))
        assert self.same(trainer, flat(await trainer.export("a")), flat(await fresh.export("b")))
        await trainer.open("plain", spec_for(trainer))
        with pytest.raises(IntegrityError):
            await trainer.load("plain", directory)

    async def test_amplified_dora_is_as_with_a_larger_alpha(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_trained(trainer, "a", dora=True)
        amplified = await trainer.logprobs(Policy("a", amplify=8.0), random_batch(5))
        write_peft((await trainer.export("a")).amplified(8.0), tmp_path, "base")
        await trainer.open("larger", spec_for(trainer, dora=True, alpha=64, source=tmp_path))
        larger = await trainer.logprobs(Policy("larger"), random_batch(5))
        np.testing.assert_allclose(amplified, larger, atol=_CLOSE)
        assert np.abs(amplified - await trainer.logprobs(Policy("a"), random_batch(5))).max() > 0.1

    async def test_recomputed_dora_changes_no_bit(self, trainer: Trainer) -> None:
        ends = []
        for recomputed in (False, True):
            await open_trained(trainer, "a", dora=True, activation_checkpointing=recomputed)
            ends.append(flat(await trainer.export("a")))
            await trainer.close("a")
        assert self.same(trainer, *ends)

    async def test_dora_from_a_plain_adapter_is_refused(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_trained(trainer, "a")
        directory = await saved(trainer, "a", tmp_path / "a")
        with pytest.raises(AdapterRefused, match="its dora is False"):
            await trainer.open("b", spec_for(trainer, dora=True, source=directory))
