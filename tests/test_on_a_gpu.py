"""The builtin engine and trainer keep their rules on a CUDA device as well. Skipped where there is none;
`LORAD_TEST_DEVICE` names another.
"""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu_day.torch_place import rms
from lorad.engines.base import BASE, Engine
from lorad.engines.builtin.decode import DecodeBatch
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.models.attention import CausalAttention
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.decoder import hidden, logits
from lorad.models.directory import linear_shapes, resolve
from lorad.models.kv import attend, attend_in_part
from lorad.models.loading import load_base
from lorad.models.lora import FrozenLora, MixedLora
from lorad.models.merge import Merger
from lorad.protocol.batch import Batch
from lorad.trainers.base import Policy, Trainer
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.conformance.engine_suite import EngineSuite
from tests.conformance.trainer_kit import MakeTrainer, accumulate, spec_for
from tests.conformance.trainer_suite import TrainerSuite
from tests.engines.test_decode_batch import call, finish, same, version
from tests.kit.fakes.random_adapters import Shapes
from tests.trainers import test_experts_of_slots as experts_of_slots

TINY, GPU = resolve("builtin:tiny"), torch.device(os.environ.get("LORAD_TEST_DEVICE", "cuda:0"))
pytestmark = pytest.mark.skipif(
    GPU.type == "cuda" and not torch.cuda.is_available(), reason="there is no GPU"
)


@pytest.fixture
def compute() -> Iterator[Compute]:
    made = Compute()
    yield made
    made.close()


@pytest.fixture(scope="module")
def gpu_base() -> Base:
    return load_base(TINY, torch.float32, GPU)


class TestEngine(EngineSuite):
    @pytest.fixture
    def shapes(self, gpu_base: Base) -> Shapes:
        return linear_shapes(gpu_base.config)

    @pytest.fixture
    async def engine(self, gpu_base: Base) -> AsyncIterator[Engine]:
        compute = Compute()
        engine = BuiltinEngine(gpu_base, compute, TINY, cache_bytes=1 << 28)
        yield engine
        await engine.close()
        compute.close()


class TestTrainer(TrainerSuite):
    @pytest.fixture
    def make_trainer(self, base: Path) -> Iterator[MakeTrainer]:
        threads: list[Compute] = []

        async def make() -> Trainer:
            threads.append(Compute())
            return BuiltinTrainer(load_base(base, torch.float32, GPU), threads[-1], str(base))

        yield make
        for compute in threads:
            compute.close()


def test_captured_steps_give_what_a_cpu_gives(gpu_base: Base) -> None:
    cpu = Merger(load_base(TINY, torch.float32, torch.device("cpu")))
    made = []
    for models in (Merger(gpu_base), cpu):
        batch = DecodeBatch(models, 64, 1 << 28)
        made.append(finish(batch, *(call(version(models.base, seed, rank=seed), [3, 2]) for seed in (2, 3))))
    assert same(*made)


def test_scores_of_words_are_not_rounded() -> None:
    """A GPU adds products of bfloat16 up in float32: so they are served. A CPU rounds them."""
    base = load_base(TINY, torch.bfloat16, GPU)
    states = torch.randn(5, base.config.hidden_size, device=GPU).to(torch.bfloat16)
    wanted = states.double() @ base.head.double().T
    error = (logits(base, states).double() - wanted).abs().max()
    assert error < (1e-5 if GPU.type == "cuda" else 0.1)


async def test_bfloat16_on_the_device_stays_near_float32(compute: Compute) -> None:
    """Lengths that cuDNN's attention, and others with blocks of 64 or 128 tokens, may take in another way."""
    rng = np.random.default_rng(0)
    lengths = [[60, 124, 188, 7], [252, 33, 316, 129]]
    tokens = [[rng.integers(4, 90, n).astype(np.int32) for n in group] for group in lengths]
    batch = Batch.of([(np.array([5, 6, 7, 8], np.int32), group) for group in tokens])
    scored, gradients = [], []
    for dtype, device in ((torch.float32, torch.device("cpu")), (torch.bfloat16, GPU)):
        base = load_base(TINY, dtype, device)
        trainer = BuiltinTrainer(base, compute)
        engine = BuiltinEngine(base, compute, TINY, cache_bytes=1 << 26)
        await trainer.open("a", spec_for(trainer))
        scored.append([await trainer.logprobs(Policy("a"), batch), await engine.score(BASE, batch)])
        stats = await accumulate(trainer, "a", batch)
        gradients.append(trainer._slots["a"].grads.double().cpu().numpy())
        assert np.isfinite([stats.loss, *gradients[-1]]).all()
        await engine.close()
    for ours, theirs in zip(*scored, strict=True):
        assert rms(ours - theirs) < 0.06
    cosine = gradients[0] @ gradients[1] / np.prod([np.linalg.norm(each) for each in gradients])
    assert cosine > 0.99


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_adapters_on_experts_are_those_of_a_cpu(kind: str) -> None:
    """Of all experts and of some, of ranks that no product of a GPU takes, alone and beside another."""
    moe, found = resolve("builtin:tiny-moe"), []
    for dtype, device in ((torch.float32, torch.device("cpu")), (getattr(torch, kind), GPU)):
        base = load_base(moe, dtype, device)
        slots = [experts_of_slots.filled(base, 3, 1), experts_of_slots.filled(base, 8, 2, "2", "1")]
        states = experts_of_slots.states(base, slots, range(2))
        loras = [FrozenLora(base, slot.snapshot().tensors, slot.spec.adapter.scale) for slot in slots]
        mixed = MixedLora(base, loras)
        mixed.assign(np.repeat([1, 0], 24))
        ids = torch.arange(48, device=device).view(2, 24) + 3
        with torch.no_grad():
            served = hidden(base, ids, torch.arange(24, device=device), CausalAttention(), mixed)
        found.append([t.float().cpu() for t in (states, served, *(slot.grads for slot in slots))])
    for ours, expected in zip(found[1], found[0], strict=True):
        assert torch.isfinite(ours).all()
        assert torch.cosine_similarity(ours.flatten(), expected.flatten(), 0) > 0.99


@pytest.mark.parametrize(("rows", "span"), [(2, 64), (2, 1024), (40, 1024)])
def test_attention_in_parts_has_its_total(rows: int, span: int) -> None:
    """By the fused kernel and by products: what is seen, and the logsumexp of the scores."""
    dtype = torch.float32 if GPU.type == "cpu" else torch.bfloat16
    random = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, 2, 4, 64, generator=random).to(GPU, dtype)
    keys, values = torch.randn(2, rows, 2, span, 64, generator=random).to(GPU, dtype)
    bias = torch.zeros(rows, 1, 1, span, dtype=dtype, device=GPU)
    bias[:, ..., span // 2 + 3 :] = float("-inf")
    out, total = attend_in_part(q, keys, values, bias)
    scores = (q.float() @ keys.float().mT) / 8 + bias.float()
    assert (total - scores.logsumexp(-1, keepdim=True)).abs().max() < 0.02
    assert (out.float() - scores.softmax(-1) @ values.float()).abs().max() < 0.02
    assert (attend(q, keys, values, bias).float() - out.float()).abs().max() < 0.02
