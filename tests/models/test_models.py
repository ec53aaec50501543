"""The lean forward against transformers and PEFT, on random Qwen3 models made here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM

from lorad.errors import SpecError
from lorad.models import loading
from lorad.models.attention import CausalAttention
from lorad.models.base import Base
from lorad.models.decoder import hidden, logits
from lorad.models.directory import linear_shapes, read_config
from lorad.models.facts import read_facts
from lorad.models.loading import load_base
from lorad.models.lora import FrozenLora, MixedLora, RoutedLora
from lorad.models.merge import Merger
from lorad.models.ops import prepare

# PEFT reads a property that transformers has deprecated

CPU = torch.device("cpu")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_model(directory: Path, shard: str = "1GB", **options: Any) -> Qwen3ForCausalLM:
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**(settings | options))).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(directory, max_shard_size=shard)
    return model


def lean(base: Base, ids: torch.Tensor, lora: Any = None) -> torch.Tensor:
    with torch.no_grad():
        return logits(base, hidden(base, ids, torch.arange(ids.shape[1]), CausalAttention(), lora), lora)


def some_ids(batch: int = 3, time: int = 9) -> torch.Tensor:
    return torch.randint(0, 64, (batch, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_logits_equal_those_of_transformers(tmp_path: Path, kv_heads: int) -> None:
    model = make_model(tmp_path, num_key_value_heads=kv_heads)
    with torch.no_grad():
        expected = model(some_ids()).logits
    base = load_base(tmp_path, torch.float32, CPU)
    assert (lean(base, some_ids()) - expected).abs().max() < 1e-4
    assert base.config.num_parameters == sum(p.numel() for p in model.parameters())


def test_loaded_base_never_meets_attention_of_cudnn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_model(tmp_path)
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_base(tmp_path, torch.float32, CPU)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    prepare(torch.device("cuda:3"))
    assert chosen == [torch.device("cuda:3")]


def test_padding_on_the_right_changes_nothing(tmp_path: Path) -> None:
    make_model(tmp_path)
    base = load_base(tmp_path, torch.float32, CPU)
    ids = some_ids()
    assert (lean(base, ids)[:, :5] - lean(base, ids[:, :5])).abs().max() < 1e-5


def peft_tensors(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    prefix = "base_model.model."
    return {
        name.removeprefix(prefix)
        .replace(".default", "")
        .replace("vector.weight", "vector"): tensor.detach().numpy()
        for name, tensor in model.named_parameters()
        if ".lora_" in name
    }


def with_peft(
    model: Qwen3ForCausalLM,
    targets: list[str],
    rank: int = 4,
    rslora: bool = False,
    seed: int = 3,
    *,
    dora: bool = False,
) -> Any:
    wrapped = get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=8, target_modules=targets, use_rslora=rslora, use_dora=dora)
    )
    torch.manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, float("magnitude" in name), 0.1)
    return wrapped


@pytest.mark.parametrize(
    ("targets", "rslora", "scale"),
    [
        (["q_proj", "v_proj"], False, 2.0),
        (["up_proj", "k_proj"], False, 2.0),
        (ALL, True, 4.0),
    ],
    ids=["q-and-v", "up-and-k", "rslora"],
)
def test_frozen_lora_equals_peft(tmp_path: Path, targets: list[str], rslora: bool, scale: float) -> None:
    wrapped = with_peft(make_model(tmp_path), targets, rslora=rslora)
    with torch.no_grad():
        expected = wrapped(some_ids()).logits
    base = load_base(tmp_path, torch.float32, CPU)
    lora = FrozenLora(base, peft_tensors(wrapped), scale)
    assert (lean(base, some_ids(), lora) - expected).abs().max() < 1e-4
    assert (lean(base, some_ids()) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("targets", [ALL, ["v_proj", "gate_proj"]], ids=["all", "some"])
def test_frozen_dora_equals_peft(tmp_path: Path, targets: list[str]) -> None:
    wrapped = with_peft(make_model(tmp_path, attention_bias=True), targets, dora=True)
    with torch.no_grad():
        expected = wrapped(some_ids()).logits
    base = load_base(tmp_path, torch.float32, CPU)
    lora = FrozenLora(base, peft_tensors(wrapped), 2.0)
    merged, rest = Merger(base).alone(lora)
    assert rest is None
    assert (lean(base, some_ids(), lora) - expected).abs().max() < 1e-4
    assert (lean(merged, some_ids()) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("owner", [[0, 0, 1, 1, 2, 2], [2, 0, 1, 1, 2, 1]], ids=["even", "uneven"])
def test_mixed_adapters_in_one_batch_equal_each_alone(tmp_path: Path, owner: list[int], dora: bool) -> None:
    make_model(tmp_path)
    base = load_base(tmp_path, torch.float32, CPU)
    narrow = peft_tensors(with_peft(make_model(tmp_path), ["q_proj", "down_proj"], rank=2, seed=4))
    loras = [
        FrozenLora(base, peft_tensors(with_peft(make_model(tmp_path), ALL, dora=dora)), 2.0),
        FrozenLora(base, narrow, 4.0),
    ]
    ids = some_ids(batch=6)
    alone = [lean(base, ids, lora) for lora in (*loras, None)]
    for room in ((), (27, 81)):  # as many tokens as there are, or more, as in a captured step
        together = MixedLora(base, [*loras, None], *room)
        together.assign(np.repeat(owner, 9))
        mixed = lean(base, ids, together)
        for row, adapter in enumerate(owner):
            assert (mixed[row] - alone[adapter][row]).abs().max() < 1e-5
    together.fill([None, *loras])
    assert (lean(base, ids, together)[owner.index(0)] - alone[2][owner.index(0)]).abs().max() < 1e-5


def test_gradients_reach_only_what_the_adapter_adds(tmp_path: Path) -> None:
    make_model(tmp_path)
    base = load_base(tmp_path, torch.float32, CPU)
    delta = torch.zeros(32, requires_grad=True)

    class Shift:
        def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return y + delta if group == "down" else y

        def reaches(self, layer: int, group: str) -> bool:
            return group == "down"

        def has_experts(self, layer: int) -> bool:
            return False

        def routed(self, layer: int, tokens: torch.Tensor, ends: torch.Tensor) -> RoutedLora:
            raise AssertionError("there are no experts here")

    hidden(base, some_ids(), torch.arange(9), CausalAttention(), Shift()).sum().backward()
    assert delta.grad is not None and delta.grad.abs().max() > 0
    assert all(not weight.requires_grad for _, weight in base.weights())


def test_checksum_sees_one_changed_weight(tmp_path: Path) -> None:
    make_model(tmp_path)
    base = load_base(tmp_path, torch.float32, CPU)
    before = base.checksum()
    assert before == load_base(tmp_path, torch.float32, CPU).checksum()
    o = base.layers[1].o
    assert isinstance(o, torch.Tensor)
    o[0, 0] += 1e-3
    assert base.checksum() != before


@pytest.mark.parametrize(("mapped", "most"), [(2**26, 1), (0, 25)])  # bytes, and tensors
def test_shards_are_opened_as_often_as_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: int, most: int
) -> None:
    make_model(tmp_path)
    opened = []

    def open_shard(path: Path, framework: str) -> Any:
        opened.append(path)
        return safe_open(path, framework)

    monkeypatch.setattr(loading, "safe_open", open_shard)
    monkeypatch.setattr(loading, "_MAPPED", mapped)
    load_base(tmp_path, torch.float32, CPU)
    assert opened == [tmp_path / "model.safetensors"] * most


def test_bfloat16_is_near_and_half_the_memory(tmp_path: Path) -> None:
    make_model(tmp_path)
    full, half = (load_base(tmp_path, dtype, CPU) for dtype in (torch.float32, torch.bfloat16))
    assert (lean(full, some_ids()) - lean(half, some_ids()).float()).abs().max() < 0.5
    assert read_facts(tmp_path).bytes("float32") == 2 * read_facts(tmp_path).bytes("bfloat16")


def rewrite_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path)
    rewrite_config(tmp_path, intermediate_size=64)
    with pytest.raises(SpecError, match="gate_proj"):
        load_base(tmp_path, torch.float32, CPU)


def test_linear_shapes_are_the_linears_of_transformers(tmp_path: Path) -> None:
    model = make_model(tmp_path, tie_word_embeddings=False)
    linears = {n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert linear_shapes(read_config(tmp_path)) == linears
