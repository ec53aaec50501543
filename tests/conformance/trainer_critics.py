"""Critics: values and their gradients against PEFT and finite differences; nothing else feels them."""

import shutil
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from lorad.adapters.adapter import PEFT_PREFIX
from lorad.adapters.peft import WEIGHTS, read_peft
from lorad.errors import Conflict, IntegrityError
from lorad.protocol.batch import Batch, LossStats, ValueLoss, ValueTargets
from lorad.trainers.base import Policy, Trainer
from tests.conformance.reference import random_batch, reference_model
from tests.conformance.trainer_kit import (
    PLAIN,
    MakeTrainer,
    TrainerCase,
    accumulate,
    flat,
    open_trained,
    saved,
    spec_for,
)

HEAD = "value_head.safetensors"


def value_targets(batch: Batch, seed: int = 0) -> ValueTargets:
    """Some tokens are not trained."""
    rng = np.random.default_rng(seed)
    returns, values = rng.normal(size=(2, batch.completions.size)).astype(np.float32)
    weights = (np.arange(batch.completions.size) % 5 != 1).astype(np.float32)
    return ValueTargets(returns, values, weights)


async def criticise(trainer: Trainer, slot: str, batch: Batch, clip: float | None = None) -> LossStats:
    size = float(batch.completions.size)
    return await trainer.value_backward(slot, batch, value_targets(batch), ValueLoss(clip), size)


async def open_critic(trainer: Trainer, slot: str, steps: int = 3, **settings: object) -> None:
    """A critic whose A, B and head all get gradients."""
    await trainer.open(slot, spec_for(trainer, critic=True, **settings))
    await teach(trainer, slot, range(steps))


async def teach(trainer: Trainer, slot: str, seeds: range) -> list[LossStats]:
    """One optimizer step for each seed."""
    stats = []
    for seed in seeds:
        stats.append(await criticise(trainer, slot, random_batch(seed), clip=0.2))
        await trainer.optim_step(slot, 1e-2, 1.0)
    return stats


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """Adapter and head of a checkpoint."""
    return {**load_file(directory / WEIGHTS), **load_file(directory / HEAD)}


def moved(directory: Path, changes: dict[str, np.ndarray], to: Path) -> Path:
    """A copy of a checkpoint with something added to its tensors."""
    shutil.copytree(directory, to)
    for name in (WEIGHTS, HEAD):
        tensors = load_file(to / name)
        save_file({key: array + changes[key] for key, array in tensors.items()}, to / name)
    return to


def reference_values(model: torch.nn.Module, head: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
    """[T], sample by sample, by transformers' own last hidden state; with a gradient."""
    found = []
    for prompt, completions in batch.groups():
        for completion in completions:
            ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
            states = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
            found.append((states @ head["weight"][0] + head["bias"])[len(prompt) - 1 : -1])
    return torch.cat(found)


class Critics(TrainerCase):
    finite_step: ClassVar[float] = 3e-2  # of finite differences

    async def value_gradient(
        self, trainer: Trainer, start: Path, batch: Batch, to: Path
    ) -> dict[str, np.ndarray]:
        """That of `criticise` at a checkpoint, read off a plain step. to: a directory to be made."""
        settings = {"critic": True, "optimizer": PLAIN}
        await trainer.open("plain", spec_for(trainer, **settings))
        await trainer.load("plain", start)
        await criticise(trainer, "plain", batch)
        before = tensors_of(await saved(trainer, "plain", to))
        await trainer.optim_step("plain", PLAIN.eps, 0.0)
        after = tensors_of(await saved(trainer, "plain", to.with_name(f"{to.name} after")))
        await trainer.close("plain")
        return {name: before[name] - after[name] for name in before}

    async def test_a_new_critic_values_everything_at_zero(self, trainer: Trainer) -> None:
        info = await trainer.open("c", spec_for(trainer, critic=True))
        policy = await trainer.open("p", spec_for(trainer))
        values = await trainer.values("c", random_batch(0))
        assert values.dtype == np.float32 and values.tolist() == [0.0] * random_batch(0).completions.size
        head = info.parameters - policy.parameters
        assert (head, info.tensors - policy.tensors) == (64 + 1, 2)
        assert info.bytes - policy.bytes == 4 * 4 * head

    async def test_values_and_gradient_are_those_of_peft(
        self, trainer: Trainer, base: Path, tmp_path: Path
    ) -> None:
        await open_critic(trainer, "c")
        directory, batch = await saved(trainer, "c", tmp_path / "c"), random_batch(5)
        model = reference_model(base, directory)
        head = {
            key: torch.from_numpy(array).requires_grad_()
            for key, array in load_file(directory / HEAD).items()
        }
        expected, targets = reference_values(model, head, batch), value_targets(batch)
        np.testing.assert_allclose(
            await trainer.values("c", batch), expected.detach().numpy(), atol=self.close_to * 10
        )
        assert targets.weights is not None
        missed = expected - torch.from_numpy(targets.returns)
        (0.5 * torch.from_numpy(targets.weights) * missed.square()).mean().backward()
        grads = [p.grad for p in (*model.parameters(), *head.values()) if p.grad is not None]
        await criticise(trainer, "c", batch)
        result = await trainer.optim_step("c", 0.0, 0.0)
        assert result.grad_norm == pytest.approx(sum(float(g.square().sum()) for g in grads) ** 0.5, rel=1e-3)

    async def test_gradients_agree_with_finite_differences(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_critic(trainer, "c")
        start, batch = await saved(trainer, "c", tmp_path / "start"), random_batch(5)
        gradient = await self.value_gradient(trainer, start, batch, tmp_path / "plain")
        targets = value_targets(batch)
        assert targets.weights is not None
        for part in (HEAD, WEIGHTS):
            rng, names = np.random.default_rng(1), load_file(start / part).keys()
            along = {
                name: grad * (name in names) * rng.uniform(0, 1, grad.shape)
                for name, grad in gradient.items()
            }
            norm = sum(float((array**2).sum()) for array in along.values()) ** 0.5
            along = {name: (array / norm).astype(np.float32) for name, array in along.items()}
            losses = []
            for sign in (1, -1):
                changes = {name: array * np.float32(sign * self.finite_step) for name, array in along.items()}
                await trainer.load("c", moved(start, changes, tmp_path / f"{part} {sign}"))
                missed = (await trainer.values("c", batch)).astype(np.float64) - targets.returns
                losses.append(0.5 * float((targets.weights * missed**2).mean()))
            slope = sum(float((gradient[name] * along[name]).sum()) for name in gradient)
            assert abs(slope) > 1e-3
            assert (losses[0] - losses[1]) / (2 * self.finite_step) == pytest.approx(slope, rel=0.02)

    async def test_a_critic_changes_neither_base_nor_policy(self, trainer: Trainer) -> None:
        await open_trained(trainer, "p")
        checksum, before = await trainer.base_checksum(), await trainer.logprobs(Policy("p"), random_batch(5))
        await open_critic(trainer, "c")
        assert await trainer.base_checksum() == checksum
        assert self.same(trainer, await trainer.logprobs(Policy("p"), random_batch(5)), before)

    async def test_policy_and_critic_train_as_each_alone(self, trainer: Trainer, tmp_path: Path) -> None:
        for slot in ("c", "alone c"):
            await trainer.open(slot, spec_for(trainer, critic=True))
        for slot in ("p", "alone p"):
            await trainer.open(slot, spec_for(trainer))
        for seed in range(3):
            await accumulate(trainer, "p", random_batch(seed))
            await criticise(trainer, "c", random_batch(seed), clip=0.2)
            for slot in ("p", "c"):
                await trainer.optim_step(slot, 1e-2, 1.0)
        for seed in range(3):
            await accumulate(trainer, "alone p", random_batch(seed))
            await trainer.optim_step("alone p", 1e-2, 1.0)
        await teach(trainer, "alone c", range(3))
        for slot in "pc":
            ours, alone = [await saved(trainer, name, tmp_path / name) for name in (slot, f"alone {slot}")]
            self.assert_same_files(trainer, ours, alone)

    async def test_a_critic_learns_with_its_head(self, trainer: Trainer, tmp_path: Path) -> None:
        await trainer.open("c", spec_for(trainer, critic=True))
        batch = random_batch(0)
        first = (await criticise(trainer, "c", batch)).loss
        for _ in range(15):
            await trainer.optim_step("c", 1e-2, 1.0)
            last = await criticise(trainer, "c", batch)
        assert last.loss < 0.7 * first and last.tokens == batch.completions.size
        head = load_file(await saved(trainer, "c", tmp_path / "c") / HEAD)
        assert all(np.abs(array).max() > 0 for array in head.values())

    async def test_the_clip_is_counted_and_bounds(self, trainer: Trainer) -> None:
        await open_critic(trainer, "c")
        batch = random_batch(5)
        values = await trainer.values("c", batch)
        away = ValueTargets(values - 1, values - np.float32(0.5))  # each moved by .5 towards its return
        stats = await trainer.value_backward("c", batch, away, ValueLoss(0.2), 1.0)
        assert stats.clipped == 0 and stats.loss == pytest.approx(0.5 * values.size, rel=1e-3)
        beyond = ValueTargets(values, values - np.float32(0.5))
        stats = await trainer.value_backward("c", batch, beyond, ValueLoss(0.2), 1.0)
        assert stats.clipped == values.size and stats.loss == pytest.approx(
            0.5 * 0.3**2 * values.size, rel=1e-3
        )
        await trainer.discard_grads("c")
        assert (await trainer.optim_step("c", 1e-2, 1.0)).grad_norm == 0

    async def test_a_critics_micro_batches_may_have_any_size(self, trainer: Trainer, tmp_path: Path) -> None:
        batch, norms, values, losses = random_batch(5, groups=4), [], [], []
        for budget in (16384, 40, 1):
            await open_critic(trainer, "c", tokens_per_microbatch=16384)
            start = await saved(trainer, "c", tmp_path / f"{budget}")
            await trainer.close("c")
            await trainer.open("c", spec_for(trainer, critic=True, tokens_per_microbatch=budget))
            await trainer.load("c", start)
            values.append(await trainer.values("c", batch))
            losses.append((await criticise(trainer, "c", batch)).loss)
            norms.append((await trainer.optim_step("c", 0.0, 0.0)).grad_norm)
            await trainer.close("c")
        for some in (norms, losses):
            assert some[1:] == pytest.approx([some[0]] * 2, rel=1e-4)
        for found in values[1:]:
            np.testing.assert_allclose(found, values[0], atol=self.close_to)

    async def test_a_loaded_critic_continues_bit_for_bit(
        self, trainer: Trainer, make_trainer: MakeTrainer, tmp_path: Path
    ) -> None:
        settings = {"critic": True, "dropout": 0.1, "activation_checkpointing": True}
        await trainer.open("c", spec_for(trainer, **settings))
        await teach(trainer, "c", range(2))
        directory = await saved(trainer, "c", tmp_path / "middle")
        before = await trainer.values("c", random_batch(5))
        await teach(trainer, "c", range(2, 4))
        fresh = await make_trainer()
        await fresh.open("d", spec_for(fresh, seed=4, **settings))
        await fresh.load("d", directory)
        assert self.same(trainer, await fresh.values("d", random_batch(5)), before)
        await teach(fresh, "d", range(2, 4))
        ends = [await saved(*end) for end in ((trainer, "c", tmp_path / "x"), (fresh, "d", tmp_path / "y"))]
        self.assert_same_files(trainer, *ends)

    async def test_a_critics_checkpoint_is_a_peft_directory(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_critic(trainer, "c")
        directory = await saved(trainer, "c", tmp_path / "c")
        assert read_peft(directory).digest() == (await trainer.export("c")).digest()
        assert all(key.startswith(PEFT_PREFIX) for key in load_file(directory / WEIGHTS))

    async def test_a_checkpoint_without_a_head_is_refused(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_trained(trainer, "p")
        await open_critic(trainer, "c")
        policy, critic = [await saved(trainer, slot, tmp_path / slot) for slot in "pc"]
        before = await trainer.values("c", random_batch(5))
        with pytest.raises(IntegrityError, match="value_head"):
            await trainer.load("c", policy)
        with pytest.raises(IntegrityError, match="value_head"):
            await trainer.load("p", critic)
        (critic / HEAD).unlink()
        with pytest.raises(IntegrityError, match=HEAD):
            await trainer.load("c", critic)
        assert self.same(trainer, await trainer.values("c", random_batch(5)), before)

    async def test_policies_and_critics_are_not_mixed_up(self, trainer: Trainer) -> None:
        await trainer.open("p", spec_for(trainer))
        await trainer.open("c", spec_for(trainer, critic=True))
        with pytest.raises(Conflict, match="no critic"):
            await trainer.values("p", random_batch(0))
        with pytest.raises(Conflict, match="no critic"):
            await criticise(trainer, "p", random_batch(0))
        with pytest.raises(Conflict, match="is a critic"):
            await accumulate(trainer, "c", random_batch(0))
        bad = msgspec.structs.replace(value_targets(random_batch(0)), returns=np.zeros(1, np.float32))
        with pytest.raises(ValueError, match="returns"):
            await trainer.value_backward("c", random_batch(0), bad, ValueLoss(), 1.0)
        for slot in "pc":
            assert (await trainer.optim_step(slot, 1e-2, 1.0)).grad_norm == 0

    async def test_a_source_starts_a_critics_adapter(self, trainer: Trainer, tmp_path: Path) -> None:
        await open_trained(trainer, "p")
        directory = await saved(trainer, "p", tmp_path / "p")
        await trainer.open("c", spec_for(trainer, critic=True, source=directory))
        assert np.array_equal(flat(await trainer.export("c")), flat(await trainer.export("p")))
        assert not (await trainer.values("c", random_batch(0))).any()
