"""Bases without weights on the fake device, and what a trainer and an engine do with them."""

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorad.adapters.adapter import AdapterConfig
from lorad.engines.builtin.calls import Call, HeldLora
from lorad.engines.builtin.decode import DecodeBatch
from lorad.engines.builtin.prefix import PrefixCache
from lorad.models import loading
from lorad.models.base import Base
from lorad.models.directory import linear_shapes
from lorad.models.lora import FrozenLora
from lorad.models.merge import Merger
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets, Prompt, Sampling
from lorad.protocol.calls import ForwardBackward
from lorad.trainers.base import SlotSpec
from lorad.trainers.builtin import passes
from lorad.trainers.builtin.ahead import LayoutsAhead
from lorad.trainers.builtin.lora import SlotLora
from lorad.trainers.builtin.microbatch import Microbatch, mixed, plan
from lorad.trainers.builtin.slot import Slot, new_slot
from tests.fake_gpu.device import CUDA, FakeGpu

Rounding = Literal["nf4", "fp8"] | None
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def config(architecture: str = "Qwen3ForCausalLM", kind: str = "qwen3", **other: Any) -> dict[str, Any]:
    """Return the config.json of a model of two layers."""
    return {
        "architectures": [architecture],
        "model_type": kind,
        "dtype": "bfloat16",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        **other,
    }


def mixture() -> dict[str, Any]:
    """Return the config.json of a small mixture of experts."""
    return config("Qwen3MoeForCausalLM", "qwen3_moe", norm_topk_prob=True, **EXPERTS)


def wide() -> dict[str, Any]:
    """Return that of a model whose logits weigh little beside what a pass keeps."""
    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "head_dim": 128,
    }
    return config(**sizes, num_attention_heads=16, num_key_value_heads=8, vocab_size=1024)


def base_of(written: dict[str, Any], dtype: torch.dtype = torch.bfloat16, quantize: Rounding = None) -> Base:
    """Load a base onto the fake device, with tensors of the right shapes in place of weights."""

    class NoWeights(loading._Source):
        def __init__(self, directory: Path, dtype: Any, device: Any, quantize: Any) -> None:
            self.directory = directory
            self.dtype = dtype
            self.device = device
            self.quantize = quantize
            self.files = {}
            self.rest = set()

        def _mapped(self, name: str, shape: Any) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / "config.json").write_text(json.dumps(written))
        (Path(folder) / "model.safetensors").touch()
        patch.setattr(loading, "_Source", NoWeights)
        return loading.load_base(Path(folder), dtype, CUDA, quantize)


def even_experts(gpu: FakeGpu, experts: int = 8) -> Callable[[Tensor], NDArray[Any] | None]:
    """Return what the host reads where it asks where the rows of each expert end: all have as many."""

    def ends(tensor: Tensor) -> NDArray[Any] | None:
        if tensor.dtype != torch.int32 or tensor.shape != (experts,):
            return None
        return np.linspace(0, gpu.sorted, experts + 1)[1:].astype(np.int32)

    return ends


# -- the engine ----------------------------------------------------------------------------------------------
PLAIN = HeldLora("base", "base", None)  # the base without an adapter


def version(base: Base, name: str, rank: int = 8, only: str = "") -> HeldLora:
    """Return a version of all linears but the head, or of those alone that have a word in their names."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for linear in filter(lambda linear: only in linear, _targets(base)):
        out, into = linear_shapes(base.config)[linear]
        tensors[f"{linear}.lora_A.weight"] = np.zeros((rank, into), np.float32)
        tensors[f"{linear}.lora_B.weight"] = np.zeros((out, rank), np.float32)
    return HeldLora(name, name, FrozenLora(base, tensors, 2.0))


def call(version: HeldLora, counts: Sequence[int], prompt: int, new: int, **sampling: Any) -> Call:
    """Return a request of `counts` samples for each of several prompts of equal length."""
    prompts = [
        Prompt(
            str(number),
            np.full(prompt, 4 + number, np.int32),
            np.arange(100 * number, 100 * number + count, dtype=np.uint64),
        )
        for number, count in enumerate(counts)
    ]
    return Call("r", version, prompts, Sampling(new, **sampling), None)


def batch_of(
    base: Base, rows: int = 64, cache: int = 1 << 30, prefixes: PrefixCache | None = None
) -> DecodeBatch:
    """Return an engine's batch without requests."""
    return DecodeBatch(Merger(base), rows, cache, prefixes)


def finish(batch: DecodeBatch, calls: Iterable[Call]) -> None:
    """Decode until all requests have ended."""
    for request in calls:
        batch.join(request)
    while batch.calls:
        batch.run(600)


# -- the trainer ---------------------------------------------------------------------------------------------
def work_of(
    base: Base, groups: int, prompt: int, completion: int, per: int = 8, ragged: int = 0, seed: int = 0
) -> tuple[Batch, PolicyTargets]:
    """Return groups of samples of up to `ragged` tokens more or less, and targets for them."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> NDArray[np.int32]:
        return rng.integers(4, base.config.vocab_size, count).astype(np.int32)

    samples = [
        (
            tokens(prompt + int(rng.integers(0, ragged + 1))),
            [tokens(completion - int(rng.integers(0, ragged + 1))) for _ in range(per)],
        )
        for _ in range(groups)
    ]
    batch = Batch.of(samples)
    sampled = np.full(batch.completions.size, -8.0, np.float32)
    advantages = rng.normal(size=batch.completions.size).astype(np.float32)
    return batch, PolicyTargets(advantages, sampled, reference_logprobs=sampled)


def slot_of(
    base: Base, rank: int = 8, tokens: int = 16384, head: bool = False, adapter: Any = None, **spec: Any
) -> Slot:
    """Return a run's place in the trainer."""
    targets = _targets(base, head)
    settings = AdapterConfig(rank, 2.0 * rank, targets, **(adapter or {}))
    return new_slot(base, SlotSpec(settings, tokens_per_microbatch=tokens, **spec))


def gradients(
    base: Base,
    slot: Slot,
    work: tuple[Batch, PolicyTargets],
    loss: PolicyLoss | None = None,
    recompute: bool = False,
) -> list[Microbatch]:
    """Compute gradients as the trainer does, and return the micro-batches."""
    batch, targets = work
    gradient = ForwardBackward(batch, targets, loss or PolicyLoss(), float(batch.completions.size), "s")
    pieces = [plan(batch, slot.tokens_per_microbatch, share=True)]

    def quantum(ahead: LayoutsAhead) -> Microbatch:
        _, rows = ahead.take()
        lora = SlotLora([slot], rows.rows, train=True)
        passes.forward_backward(base, rows, lora, [gradient], recompute, ahead.lay)
        return rows

    return [each() for each in LayoutsAhead(base, mixed(pieces, slot.tokens_per_microbatch)).each(quantum)]


def _targets(base: Base, head: bool = False) -> tuple[str, ...]:
    return tuple(sorted(name for name in linear_shapes(base.config) if head or name != "lm_head"))
