"""Passes, steps and checkpoints of the trainer on the fake device: reads, bytes and kernels of attention."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from lorad.backends.activations import kept
from lorad.models.base import Base
from lorad.models.facts import read_facts
from lorad.protocol.batch import PolicyLoss, ValueLoss, ValueTargets
from lorad.protocol.calls import ForwardBackward, ValueBackward
from lorad.spec.algorithm import Preference, PreferenceLoss
from lorad.trainers.builtin import ahead, critic, passes
from lorad.trainers.builtin.ahead import LayoutsAhead
from lorad.trainers.builtin.lent import Arena
from lorad.trainers.builtin.lora import SlotLora
from lorad.trainers.builtin.microbatch import BatchPiece, Laid, lay, pack, plan
from lorad.trainers.builtin.slot import load_slot, save_slot
from tests.fake_gpu.cuda import fake_gpu
from tests.fake_gpu.device import CUDA
from tests.fake_gpu.scenes import (
    Rounding,
    base_of,
    config,
    even_experts,
    gradients,
    mixture,
    slot_of,
    wide,
    work_of,
)
from tests.fake_gpu.test_decoding import assert_fused

LOSSES = {
    "clip": PolicyLoss(),
    "kl": PolicyLoss(kl_coef=0.1),
    "kl weighed": PolicyLoss(kl_coef=0.1, kl_weighed=True),
    "geometric": PolicyLoss(ratio="geometric"),
    "sequence": PolicyLoss(ratio="sequence"),
    "dual": PolicyLoss(dual=3.0),
    "weighted": PolicyLoss(surrogate="weighted", drops=True),
    "soft": PolicyLoss(surrogate="soft"),
    "divergence": PolicyLoss(surrogate="divergence"),
    "dro": PolicyLoss(surrogate="dro"),
    "rectified": PolicyLoss(surrogate="rectified"),
    "linear": PolicyLoss(surrogate="linear"),
    "entropy": PolicyLoss(entropy_coef=0.01),
    "capped": PolicyLoss(importance_cap=2.0),
    "returns": PolicyLoss(returns_logprobs=True),
    "warm": PolicyLoss(temperature=0.7),
    **{
        f"preference {name}": PolicyLoss(
            "preference", preference=Preference(loss=name), returns_logprobs=True
        )
        for name in get_args(PreferenceLoss)
    },
}
# one formula for another of the same numbers: `preference sigmoid` and `preference kto` are in CI
_MARKS = {f"preference {loss}": pytest.mark.long for loss in ("sigmoid_norm", "hinge", "apo_zero", "simpo")}
READS = {"geometric": 2, "sequence": 2, "returns": 2}  # of a micro-batch; the others have one
WRITES = {"geometric": 3, "sequence": 3, "returns": 2}  # copies for which the host waits, likewise
OF_PREFERENCES = 3  # of either
LENT = 0.5  # of the most bytes of a pass of four layers
PASS = 100  # kernels of a pass of one layer at least
SENT = 2  # copies out of pinned memory: of the tokens, and of how they lie
ADAPTERS: dict[str, dict[str, Any]] = {
    "dropout": {"adapter": {"dropout": 0.1}},
    "dora": {"adapter": {"dora": True}},
    "dora and dropout": {"adapter": {"dora": True, "dropout": 0.1}},
    "head": {"head": True},
    "rank of experts": {"adapter": {"expert_rank": 4}},
    "layout of Megatron": {"lora_type": "lora"},
}


@pytest.mark.system(but="clip")
@pytest.mark.parametrize("loss", [pytest.param(loss, marks=_MARKS.get(loss, ())) for loss in LOSSES])
def test_a_pass_reads_once_a_micro_batch(loss: str) -> None:
    with fake_gpu(grad=True) as gpu:
        base = base_of(config(num_hidden_layers=1))  # which each have the same, if they read at all
        slot = slot_of(base, tokens=2048)
        is_preference = LOSSES[loss].preference is not None
        work = work_of(base, 2, 70, 60, per=2 if is_preference else 4, ragged=30)
        gpu.forget()
        pieces = gradients(base, slot, work, LOSSES[loss])
        most = OF_PREFERENCES if is_preference else READS.get(loss, 1)
        assert len(gpu.reads) <= len(pieces) * most, Counter(read.place for read in gpu.reads)
        most = OF_PREFERENCES if is_preference else WRITES.get(loss, 1)
        assert len(gpu.writes) <= len(pieces) * most, Counter(c.place for c in gpu.writes)
        assert len(gpu.sent) <= len(pieces) * SENT
        assert_fused(gpu)


@pytest.mark.system(but="1")
@pytest.mark.parametrize("groups", [1, 2])
def test_next_layout_is_made_while_the_gpu_works(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, bool]] = []
    with fake_gpu(grad=True) as gpu:
        base = base_of(config(num_hidden_layers=1))
        slot = slot_of(base, tokens=256)
        work = work_of(base, groups, 70, 60, per=4, ragged=30)
        gpu.forget()
        before = Counter[str]()

        def laid(base_: Base, pieces: Sequence[BatchPiece]) -> Laid:
            nonlocal before
            made.append((len(gpu.reads), gpu.kernels.total() > before.total() + PASS))
            before = gpu.kernels.copy()
            return lay(base_, pieces)

        monkeypatch.setattr(ahead, "lay", laid)
        pieces = gradients(base, slot, work)
        # the first one is for nobody; then the pass before has been launched, and not been waited for
        assert made == [(0, False), *((number, True) for number in range(len(pieces) - 1))]
        assert len(pieces) > 2 or groups == 1


@pytest.mark.system
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("experts", [False, True])
def test_every_adapter_trains(kind: str, experts: bool) -> None:
    if "dora" in kind and experts:
        pytest.skip("DoRA is refused on experts")
    with fake_gpu(grad=True) as gpu:
        base = base_of({**(mixture() if experts else config()), "num_hidden_layers": 1})
        gpu.fill = even_experts(gpu)
        slot = slot_of(base, tokens=2048, **ADAPTERS[kind])
        gradients(base, slot, work_of(base, 2, 70, 60, per=4, ragged=30))
        norm, applied = slot.optim_step(1e-5, 1.0)
        assert applied, norm


@pytest.mark.system
@pytest.mark.parametrize("experts", [pytest.param(False, marks=pytest.mark.long), True])
def test_activations_are_recomputed(experts: bool) -> None:
    with fake_gpu(grad=True) as gpu:
        base = base_of(mixture() if experts else config())
        gpu.fill = even_experts(gpu)
        gradients(base, slot_of(base, tokens=2048), work_of(base, 2, 70, 60, per=4), recompute=True)
        assert_fused(gpu)


@pytest.mark.system
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_steps_snapshots_and_checkpoints_mix_no_devices(quantize: Rounding, tmp_path: Path) -> None:
    with fake_gpu(grad=True):
        base = base_of(config(num_hidden_layers=1), quantize=quantize)
        slot = slot_of(base)
        gradients(base, slot, work_of(base, 2, 70, 60, per=4))
        assert slot.optim_step(1e-5, 1.0)[1]
        assert slot.snapshot().tensors
        save_slot(slot, tmp_path, "model")
        load_slot(slot, tmp_path)
        assert base.checksum()


@pytest.mark.system
def test_a_critic_learns_values() -> None:
    with fake_gpu(grad=True):
        base = base_of(config(num_hidden_layers=1))
        batch, _ = work_of(base, 2, 70, 60, per=4, ragged=30)
        slot = slot_of(base, tokens=2048, critic=True)
        zeros = np.zeros(batch.completions.size, np.float32)
        work = ValueBackward(batch, ValueTargets(zeros, zeros), ValueLoss(), float(batch.completions.size))
        for quantum in (partial(critic.values, base, slot), partial(critic.backward, base, slot, work)):
            for each in LayoutsAhead(base, ({0: piece} for piece in plan(batch, 2048, share=True))).each(
                quantum
            ):
                each()
        assert slot.optim_step(1e-5, 1.0)[1]


@pytest.mark.system
def test_samples_are_scored_by_the_base() -> None:
    with fake_gpu() as gpu:
        base = base_of(config())
        batch, _ = work_of(base, 2, 70, 60, per=4, ragged=30)
        for piece in plan(batch, 2048, share=True):
            passes.score(base, pack(base, [piece]), None, 0.7)
        assert_fused(gpu)


@pytest.mark.system
def test_a_pass_keeps_what_is_foreseen(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(wide()))
    (tmp_path / "model.safetensors").touch()
    foreseen = kept(read_facts(tmp_path), torch.bfloat16.itemsize).token
    with fake_gpu(grad=True) as gpu:
        base = base_of(wide())
        slot = slot_of(base, rank=32)
        work = work_of(base, 1, 120, 250)
        gpu.forget()
        before = gpu.bytes
        pieces = gradients(base, slot, work)
        tokens = max(rows.ids.numel() for rows in pieces)
        assert gpu.peak - before <= foreseen * tokens
        del pieces
        assert gpu.bytes <= before + (64 << 20)


@pytest.mark.system
def test_activations_lie_in_lent_memory() -> None:
    peaks = []
    for lent in (0, 1 << 30):
        with fake_gpu(grad=True) as gpu:
            base = base_of(wide())
            slot = slot_of(base, rank=32)
            batch, targets = work_of(base, 1, 120, 250)
            work = ForwardBackward(batch, targets, PolicyLoss(), float(batch.completions.size), "s")
            parts = [torch.empty(1 << 26, dtype=torch.uint8, device=CUDA) for _ in range(lent >> 26)]
            (piece,) = plan(batch, 16384, share=True)
            rows = pack(base, [piece])
            arena = Arena(parts, [slot.weights, *(weight for _, weight in base.weights())])
            gpu.forget()
            before = gpu.bytes
            passes.forward_backward(
                base, rows, SlotLora([slot], rows.rows, train=True), [work], False, arena=arena
            )
            peaks.append(gpu.peak - before)
    assert arena.used > LENT * peaks[0]
    assert peaks[1] < (1 - LENT) * peaks[0]


@pytest.mark.system
def test_lengths_that_differ_need_no_plans() -> None:
    with fake_gpu(grad=True) as gpu:
        base = base_of(config(num_hidden_layers=1))
        slot = slot_of(base, tokens=4096)
        sizes = set[int]()
        for seed in range(2):
            work = work_of(base, 2, 300, 300, per=4, ragged=150, seed=seed)
            sizes |= {rows.ids.numel() for rows in gradients(base, slot, work)}
        assert len(sizes) > 1
        assert_fused(gpu)
