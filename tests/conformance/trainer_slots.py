"""Slots: what opens, what is refused, and that they touch neither the base nor each other."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lorad.errors import AdapterRefused, Conflict, NotFound
from lorad.protocol.batch import Batch
from lorad.trainers.base import Policy, Trainer
from tests.conformance.reference import random_batch
from tests.conformance.trainer_kit import (
    BASE,
    TrainerCase,
    accumulate,
    flat,
    open_trained,
    saved,
    spec_for,
    train,
)


class Slots(TrainerCase):
    async def test_training_leaves_the_base_as_it_was(self, trainer: Trainer) -> None:
        checksum, before = await trainer.base_checksum(), await trainer.logprobs(BASE, random_batch(0))
        await open_trained(trainer, "a", dropout=0.1)
        assert await trainer.base_checksum() == checksum
        assert self.same(trainer, await trainer.logprobs(BASE, random_batch(0)), before)

    async def test_interleaved_slots_end_as_each_alone(self, trainer: Trainer, tmp_path: Path) -> None:
        for slot, seed in (("a", 1), ("b", 2), ("alone a", 1), ("alone b", 2)):
            await trainer.open(slot, spec_for(trainer, seed=seed, dropout=0.1))
        for step in range(2):
            for slot in ("a", "b"):
                await accumulate(trainer, slot, random_batch(step))
            for slot in ("b", "a"):
                await trainer.optim_step(slot, 1e-2, 1.0)
        for slot in ("a", "b"):
            await train(trainer, f"alone {slot}", range(2))
            ours, alone = [await saved(trainer, name, tmp_path / name) for name in (slot, f"alone {slot}")]
            self.assert_same_files(trainer, ours, alone)
        assert not np.array_equal(flat(await trainer.export("a")), flat(await trainer.export("b")))

    async def test_concurrent_slots_end_as_each_alone(self, trainer: Trainer) -> None:
        for slot in ("a", "b", "alone"):
            await trainer.open(slot, spec_for(trainer, dropout=0.1, tokens_per_microbatch=40))
        await asyncio.gather(train(trainer, "a", range(2)), train(trainer, "b", range(2, 4)))
        await train(trainer, "alone", range(2))
        assert self.same(trainer, flat(await trainer.export("a")), flat(await trainer.export("alone")))

    async def test_the_seed_decides_how_a_slot_begins(self, trainer: Trainer) -> None:
        for slot, seed in (("a", 1), ("b", 1), ("c", 2)):
            await trainer.open(slot, spec_for(trainer, seed=seed))
        digests = [(await trainer.export(slot)).digest() for slot in ("a", "b", "c")]
        assert digests[0] == digests[1] != digests[2]

    async def test_dropout_acts_in_training_only(self, trainer: Trainer) -> None:
        await open_trained(trainer, "a", dropout=0.5)
        batch = random_batch(5)
        first, second = [await trainer.logprobs(Policy("a"), batch) for _ in range(2)]
        assert self.same(trainer, first, second)
        ratios = [(await accumulate(trainer, "a", batch, old_logprobs=first)).ratio for _ in range(2)]
        assert ratios[0] != ratios[1]

    async def test_an_export_is_a_snapshot(self, trainer: Trainer) -> None:
        await open_trained(trainer, "a")
        exported = await trainer.export("a")
        digest = exported.digest()
        await train(trainer, "a", range(5, 7))
        assert exported.digest() == digest != (await trainer.export("a")).digest()

    async def test_what_a_slot_holds_is_counted(self, trainer: Trainer) -> None:
        info = await trainer.open("a", spec_for(trainer))
        exported = await trainer.export("a")
        assert (info.slot, info.tensors) == ("a", len(exported.tensors)) == ("a", 2 * len(trainer.modules()))
        assert info.parameters == sum(tensor.size for tensor in exported.tensors.values())
        assert info.bytes >= 4 * 4 * info.parameters

    async def test_only_the_chosen_modules_are_trained(self, trainer: Trainer) -> None:
        chosen = tuple(sorted(name for name in trainer.modules() if name.endswith(("o_proj", "down_proj"))))
        await open_trained(trainer, "a", modules=chosen)
        exported = await trainer.export("a")
        assert exported.config.modules == chosen
        assert {name.partition(".lora_")[0] for name in exported.tensors} == set(chosen)
        assert all(np.abs(tensor).max() > 0 for tensor in exported.tensors.values())

    @pytest.mark.parametrize("modules", [(), ("model.layers.0.self_attn.no_proj",)])
    async def test_targets_that_match_nothing_are_refused(
        self, trainer: Trainer, modules: tuple[str, ...]
    ) -> None:
        with pytest.raises(AdapterRefused):
            await trainer.open("a", spec_for(trainer, modules=modules))
        await trainer.open("a", spec_for(trainer))

    async def test_a_name_is_opened_once(self, trainer: Trainer) -> None:
        await trainer.open("a", spec_for(trainer))
        with pytest.raises(Conflict, match="a"):
            await trainer.open("a", spec_for(trainer))
        await trainer.close("a")
        await trainer.open("a", spec_for(trainer))

    async def test_calls_on_a_closed_slot_find_nothing(self, trainer: Trainer, tmp_path: Path) -> None:
        await trainer.open("a", spec_for(trainer))
        await trainer.close("a")
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: trainer.close("a"),
            lambda: trainer.export("a"),
            lambda: trainer.discard_grads("a"),
            lambda: trainer.optim_step("a", 1e-2, 1.0),
            lambda: accumulate(trainer, "a", random_batch(0)),
            lambda: trainer.logprobs(Policy("a"), random_batch(0)),
            lambda: trainer.save("a", tmp_path),
            lambda: trainer.load("a", tmp_path),
        ]
        for call in calls:
            with pytest.raises(NotFound):
                await call()

    async def test_a_frozen_slot_is_never_trained(self, trainer: Trainer, tmp_path: Path) -> None:
        for slot, frozen in (("frozen", True), ("a", False), ("alone", False)):
            await trainer.open(slot, spec_for(trainer, frozen=frozen))
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: trainer.discard_grads("frozen"),
            lambda: trainer.optim_step("frozen", 1e-2, 1.0),
            lambda: accumulate(trainer, "frozen", random_batch(0)),
            lambda: trainer.save("frozen", tmp_path),
            lambda: trainer.load("frozen", tmp_path),
        ]
        for call in calls:
            with pytest.raises(Conflict, match="frozen"):
                await call()
        for slot in ("a", "alone"):
            await accumulate(trainer, slot, random_batch(1))
            if slot == "a":  # its gradients are not lost meanwhile
                await trainer.logprobs(Policy("frozen"), random_batch(2))
            await trainer.optim_step(slot, 1e-2, 1.0)
        await trainer.close("frozen")
        assert self.same(trainer, flat(await trainer.export("a")), flat(await trainer.export("alone")))

    async def test_a_malformed_call_adds_no_gradient(self, trainer: Trainer) -> None:
        await open_trained(trainer, "a")
        batch = random_batch(5)
        with pytest.raises(ValueError):
            await accumulate(trainer, "a", batch, advantages=np.ones(1, np.float32))
        with pytest.raises(ValueError):
            await accumulate(trainer, "a", batch, sampler_logprobs=np.ones(1, np.float32))
        assert (await trainer.optim_step("a", 1e-2, 1.0)).grad_norm == 0

    @pytest.mark.parametrize("part", ["prompts", "completions"])
    @pytest.mark.parametrize("token", [-1, None])
    async def test_token_outside_the_vocabulary_is_refused(
        self, trainer: Trainer, part: str, token: int | None
    ) -> None:
        await trainer.open("a", spec_for(trainer))
        batch = random_batch(5)
        ids = getattr(batch, part).copy()
        ids[-1] = trainer.capabilities().vocab if token is None else token
        bad = msgspec.structs.replace(batch, **{part: ids})
        with pytest.raises(ValueError, match=part):
            await trainer.logprobs(BASE, bad)
        with pytest.raises(ValueError, match=part):
            await accumulate(trainer, "a", bad)
        assert (await trainer.optim_step("a", 1e-2, 1.0)).grad_norm == 0

    async def test_logprobs_refuse_bad_temperatures_and_endless_prompts(self, trainer: Trainer) -> None:
        for temperature in (0.0, -1.0, np.nan, np.inf):
            with pytest.raises(ValueError, match="temperature"):
                await trainer.logprobs(BASE, random_batch(0), temperature)
        endless = np.zeros(trainer.capabilities().max_tokens + 1, np.int32)
        with pytest.raises(ValueError, match="prompt"):
            await trainer.logprobs(BASE, Batch.of([(endless, []), *random_batch(0).groups()]))

    async def test_offloading_keeps_the_capability_s_word(self, trainer: Trainer) -> None:
        before = await trainer.logprobs(BASE, random_batch(0))
        if trainer.capabilities().offload:
            await trainer.offload()
            await trainer.onload()
        else:
            with pytest.raises(Conflict):
                await trainer.offload()
        assert self.same(trainer, await trainer.logprobs(BASE, random_batch(0)), before)
