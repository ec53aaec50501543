"""Activations that are kept in memory which an engine lends meanwhile, instead of being recomputed."""

from typing import Any

import numpy as np
import pytest
import torch

from lorad.protocol.batch import Batch
from lorad.trainers.builtin import lent, passes
from lorad.trainers.builtin.lent import CacheLender
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.conformance.trainer_kit import accumulate, spec_for
from tests.trainers.test_builtin_trainer import compute, tokens, trainer, untied

__all__ = ["compute", "trainer", "untied"]
MICROBATCH = 64


@pytest.mark.parametrize("more", [{}, {"dropout": 0.1}])
async def test_lent_memory_changes_no_gradient(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch, more: dict[str, float]
) -> None:
    monkeypatch.setattr(lent, "_LEAST", 1)
    batch = Batch.of([(tokens(5, 6), [tokens(*range(length, 2 * length))]) for length in (20, 21, 60)])
    spec = spec_for(trainer, tokens_per_microbatch=MICROBATCH, activation_checkpointing=True, **more)
    memory = torch.zeros(8, 1 << 18, dtype=torch.uint8)
    found: list[tuple[object, np.ndarray]] = []
    # recomputed; kept where they are; too little lent; kept in what is lent, and too large for some of it
    for number, (parts, size) in enumerate(((None, 64), ([], 64), ([*memory], 8), ([*memory], 64))):
        trainer.lender = CacheLender(lambda parts=parts: parts, size, 1, 0)  # type: ignore[misc]
        await trainer.open(str(number), spec)
        stats = await accumulate(trainer, str(number), batch)
        found.append((stats, trainer._slots[str(number)].grads.numpy()))
        assert bool(memory.any()) == (number == 3)
    assert all(stats == found[0][0] and np.array_equal(grads, found[0][1]) for stats, grads in found)
    assert found[0][1].any()


@pytest.mark.parametrize(("parts", "passed"), [([], 3), (None, 1)])
async def test_microbatches_are_smaller_while_memory_is_lent(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch, parts: list[torch.Tensor] | None, passed: int
) -> None:
    """Else the engine needs it, and large ones, which recompute, are quicker than small ones that do."""
    sizes: list[int] = []
    computed = passes.forward_backward

    def counted(base: Any, rows: Any, *more: Any) -> Any:
        sizes.append(rows.ids.numel())
        return computed(base, rows, *more)

    monkeypatch.setattr(passes, "forward_backward", counted)
    batch = Batch.of([(tokens(5, 6), [tokens(*range(length, 2 * length))]) for length in (20, 21, 22)])
    more = {"tokens_per_microbatch": 128, "activation_checkpointing": True, "lent_tokens": 32}
    trainer.lender = CacheLender(lambda: parts, 32, 1, 0)
    await trainer.open("s", spec_for(trainer, **more))
    await accumulate(trainer, "s", batch)
    assert len(sizes) == passed and max(sizes) <= (32 if passed > 1 else 128)
