"""FSDP and Megatron over two nodes keep the rules of trainers; FSDP computes the bits of one machine."""

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorad.adapters.adapter import AdapterConfig
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets
from lorad.trainers.base import SlotSpec, Trainer
from tests.conformance.trainer_suite import PolicySuite, TrainerSuite
from tests.nodes.kit import MODEL, over_nodes
from tests.trainers.real.start import started
from tests.trainers.real.test_conformance import Ranks


class OverNodes(Ranks):
    @classmethod
    def started(cls, base: Path, work: Path) -> Coroutine[Any, Any, Trainer]:
        return over_nodes(cls.backend, work, base, **cls.sizes)


@pytest.mark.long
class TestFsdpOverNodes(OverNodes, TrainerSuite):
    backend, sizes = "fsdp", {"dp": 2}


@pytest.mark.long
class TestMegatronOverNodes(OverNodes, PolicySuite):
    backend, sizes = "megatron", {"dp": 2}


@pytest.mark.long
class TestMegatronStagesOnTwoNodes(OverNodes, PolicySuite):
    backend, sizes = "megatron", {"pp": 2}


def batch(seed: int) -> Batch:
    draw = np.random.default_rng(seed)
    return Batch.of(
        [
            (draw.integers(5, 50, 8).astype(np.int32), list(draw.integers(5, 50, (4, 12)).astype(np.int32)))
            for _ in range(4)
        ]
    )


async def stepped(trainer: Trainer, begin: int, end: int) -> list[tuple[str, str]]:
    """The loss and the norm of gradients of each step, to the last bit."""
    found = []
    for step in range(begin, end):
        work = batch(step)
        count = int(work.completions.size)
        advantages = np.random.default_rng(100 + step).standard_normal(16).astype(np.float32)
        targets = PolicyTargets(
            advantages=np.repeat(advantages, 12), sampler_logprobs=np.full(count, -3.0, np.float32)
        )
        gradients = await trainer.forward_backward("a", work, targets, PolicyLoss(), count)
        done = await trainer.optim_step("a", 1e-2, 1.0)
        found.append((gradients.loss.hex(), float(done.grad_norm).hex()))
    return found


async def opened(trainer: Trainer) -> None:
    modules = tuple(sorted(trainer.modules()))[:8]
    config = AdapterConfig(rank=8, alpha=16.0, modules=modules, dropout=0.1)
    await trainer.open("a", SlotSpec(config, seed=3))


@pytest.mark.system
async def test_nodes_compute_the_same_bits(tmp_path: Path) -> None:
    """Two steps here are one over nodes, a checkpoint, and one more here."""
    kept, work = tmp_path / "kept", [tmp_path / str(number) for number in range(3)]
    for directory in (kept, *work):
        directory.mkdir()
    here = await started("fsdp", MODEL, work[0], dp=2)
    await opened(here)
    whole = await stepped(here, 0, 2)
    digest = (await here.export("a")).digest()
    await here.close("a")
    over = await over_nodes("fsdp", work[1], MODEL, dp=2)
    await opened(over)
    assert await stepped(over, 0, 1) == whole[:1]
    await over.save("a", kept)
    assert await stepped(over, 1, 2) == whole[1:]
    assert (await over.export("a")).digest() == digest
    assert await over.base_checksum() == await here.base_checksum()
    await over.shut_down()
    await opened(here)
    await here.load("a", kept)
    assert await stepped(here, 1, 2) == whole[1:] and (await here.export("a")).digest() == digest
    await here.shut_down()
