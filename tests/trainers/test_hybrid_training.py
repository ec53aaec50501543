"""Packed training of gated delta nets: runs begin with states of what they share, and give gradients back."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from lorad.adapters.adapter import AdapterConfig
from lorad.models.base import Base
from lorad.models.decoder import at_once, logits
from lorad.models.directory import linear_shapes
from lorad.models.loading import load_base
from lorad.protocol.batch import Batch
from lorad.trainers.base import SlotSpec
from lorad.trainers.builtin.lora import SlotLora
from lorad.trainers.builtin.microbatch import Microbatch, pack, plan
from lorad.trainers.builtin.passes import predicting_states, recomputing
from lorad.trainers.builtin.slot import Slot, new_slot
from tests.models.bases import write_hybrid


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    write_hybrid(path)
    return path


@pytest.fixture(scope="module")
def base(directory: Path) -> Base:
    return load_base(directory, torch.float32, torch.device("cpu"))


@pytest.fixture
def slot(base: Base) -> Slot:
    """An adapter on every linear whose B is not zero."""
    modules = tuple(name for name in linear_shapes(base.config) if name != "lm_head")
    made = new_slot(base, SlotSpec(adapter=AdapterConfig(modules=modules, rank=4, alpha=8), seed=1))
    draw = torch.Generator().manual_seed(5)
    for name, weights in made.views(made.weights).items():
        if ".lora_B." in name:
            weights.copy_(torch.randn(weights.shape, generator=draw) * 0.05)
    return made


def some_tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 100, count).astype(np.int32)


def some_batch() -> Batch:
    """Prompts of many lengths, some with two stems before them; one is shorter than the convolution.
    Completions of 1 to 129 tokens, some alone behind their prompts.
    """
    head = some_tokens(50, 1)
    longer = np.concatenate([head, some_tokens(30, 2)])
    groups = [
        (np.concatenate([longer, some_tokens(2, 3)]), [2, 71, 4]),
        (np.concatenate([longer, some_tokens(90, 4)]), [4, 41]),
        (np.concatenate([head, some_tokens(64, 5)]), [34, 34]),
        (np.concatenate([head, some_tokens(1, 6)]), [8]),
        (some_tokens(3, 7), [129]),
        (some_tokens(2, 8), [1, 3, 30]),
    ]
    return Batch.of([(prompt, [some_tokens(n, 10 + n) for n in counts]) for prompt, counts in groups])


def weighed(
    base: Base, rows: Microbatch, lora: SlotLora, weights: torch.Tensor, *, again: bool = False
) -> torch.Tensor:
    """Return log-probabilities, and give the slots the gradient of their weighed sum."""
    states = predicting_states(base, rows, lora, recomputing(lora) if again else at_once)
    likely = logits(base, states, lora).log_softmax(-1).gather(-1, rows.targets[:, None])[:, 0]
    (likely * weights).sum().backward()
    return likely.detach()


def of_transformers(
    directory: Path, slot: Slot, batch: Batch, weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return what `weighed` does, and the gradients, from those of merged weights: dA = s B^T dW and
    dB = s dW A^T.
    """
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32
    ).eval()
    adapter = slot.spec.adapter
    tensors = slot.views(slot.weights)
    merged = [model.get_parameter(f"{module}.weight") for module in adapter.modules]
    pairs = [(tensors[f"{m}.lora_A.weight"], tensors[f"{m}.lora_B.weight"]) for m in adapter.modules]
    with torch.no_grad():
        for weight, (a, b) in zip(merged, pairs, strict=True):
            weight += adapter.scale * b @ a
    likely = []
    for prompt, completions in batch.groups():
        for completion in completions:
            ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))
            scores = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            likely.append(scores.gather(-1, ids[len(prompt) :, None])[:, 0])
    every = torch.cat(likely)
    grads = torch.autograd.grad((every * weights).sum(), merged)
    found: dict[str, torch.Tensor] = {}
    for module, grad, (a, b) in zip(adapter.modules, grads, pairs, strict=True):
        found[f"{module}.lora_A.weight"] = adapter.scale * b.T @ grad
        found[f"{module}.lora_B.weight"] = adapter.scale * grad @ a.T
    return every.detach(), found


def test_gradients_flow_back_through_shared_states(directory: Path, base: Base, slot: Slot) -> None:
    batch = some_batch()
    (piece,) = plan(batch, 10_000, share=True)
    rows = pack(base, [piece])
    assert len(rows.attention.layout.levels) == 4 and len(piece.stems.lengths) == 2
    weights = torch.randn(len(rows.targets), generator=torch.Generator().manual_seed(2))
    expected, gradients = of_transformers(directory, slot, batch, weights)
    greatest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for again in (False, True):
        slot.grads.zero_()
        likely = weighed(base, rows, SlotLora([slot], rows.rows, train=True), weights, again=again)
        assert (likely - expected).abs().max() < 2e-5
        for name, gradient in slot.views(slot.grads).items():
            assert (gradient - gradients[name]).abs().max() < 5e-6 * greatest, name
            assert (gradient - gradients[name]).norm() < 2e-5 * gradients[name].norm(), name


@pytest.mark.system
def test_pieces_add_up_to_the_whole(base: Base, slot: Slot) -> None:
    batch = some_batch()
    found = []
    for budget in (10_000, 200, 1):
        slot.grads.zero_()
        for piece in plan(batch, budget, share=True):
            rows = pack(base, [piece])
            lora = SlotLora([slot], rows.rows, train=True)
            weighed(base, rows, lora, torch.ones(len(rows.targets)))
        found.append(slot.grads.clone())
    for gradients in found[1:]:
        assert (gradients - found[0]).abs().max() < 1e-5 * found[0].abs().max()


def test_a_broken_sequence_harms_no_other(base: Base, slot: Slot) -> None:
    """Its gradient of NaN stays with it, also in a block with others."""
    other = Batch.of([(some_tokens(9, 1), [some_tokens(7, 2)])])
    (piece,) = plan(other, 100, share=True)
    alone = pack(base, [piece])
    (mine,) = plan(Batch.of([(some_tokens(9, 3), [some_tokens(5, 4), some_tokens(3, 5)])]), 100, share=True)
    rows = pack(base, [mine, piece])
    broken = new_slot(base, slot.spec)
    broken.weights.fill_(torch.nan)
    found = []
    for batch, lora in (
        (alone, SlotLora([slot], alone.rows, train=True)),
        (rows, SlotLora([broken, slot], rows.rows, train=True)),
    ):
        slot.grads.zero_()
        weights = torch.ones(len(batch.targets))
        likely = weighed(base, batch, lora, weights)
        found.append((likely[batch.tokens[-1]], slot.grads.clone()))
    assert torch.isnan(broken.grads).any()
    for left, right in zip(*found, strict=True):
        assert torch.allclose(left, right, rtol=1e-4, atol=1e-5)
