"""The form in which servers read adapters: whole groups, one scale, and the same change of the base."""

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.adapters.peft import CONFIG, read_peft, write_peft
from lorad.adapters.served import divided, served
from lorad.adapters.targets import match_modules
from lorad.backends.setup import targets
from lorad.engines.base import AdapterSource
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.models.compute import Compute
from lorad.models.directory import linear_shapes, read_config, resolve
from lorad.models.facts import read_facts
from lorad.models.loading import load_base
from lorad.servers.table import SERVERS
from tests.conformance.engine_suite import CANARY
from tests.conformance.reference import reference_logprobs, reference_model
from tests.kit.fakes.random_adapters import partial, random_adapter
from tests.models.bases import write_base

TINY = resolve("builtin:tiny")
SHAPES = linear_shapes(read_config(TINY))
LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SUBSETS = [chosen for count in range(1, 8) for chosen in itertools.combinations(LEAVES, count)]
QKV, GATE_UP = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}
WHOLE = random_adapter(SHAPES, 1, rank=8, std=0.2)


def of(chosen: tuple[str, ...], *, rslora: bool = False) -> Adapter:
    return partial(WHOLE, match_modules(SHAPES, list(chosen)), rslora=rslora)


def changes(adapter: Adapter) -> dict[str, np.ndarray]:
    """What it adds to each linear of the base, computed as SGLang does: by alpha / rank, whatever else is
    said.
    """
    scale, tensors = adapter.config.alpha / adapter.config.rank, adapter.tensors
    return {
        m: scale * tensors[f"{m}.lora_B.weight"] @ tensors[f"{m}.lora_A.weight"]
        for m in adapter.config.modules
    }


def leaves_by_part(adapter: Adapter) -> list[set[str]]:
    """Leaf names of what is adapted in each part of each layer."""
    found: dict[str, set[str]] = {}
    for module in adapter.config.modules:
        parent, _, last = module.rpartition(".")
        found.setdefault(parent, set()).add(last)
    return list(found.values())


@pytest.mark.parametrize("kind", sorted(SERVERS))
@pytest.mark.parametrize("rslora", [False, True])
def test_served_form_equals_its_version_for_any_targets(kind: str, rslora: bool) -> None:
    assert len(SUBSETS) == 127
    for chosen in SUBSETS:
        adapter = of(chosen, rslora=rslora)
        form = served(adapter, SHAPES, SERVERS[kind].joined, "float32")
        made, factor = changes(form), adapter.config.scale / (adapter.config.alpha / adapter.config.rank)
        for module, change in changes(adapter).items():
            np.testing.assert_allclose(made.pop(module), factor * change, rtol=1e-5, atol=1e-6)
        assert not form.config.rslora and not any(change.any() for change in made.values()), chosen


def test_sglang_is_given_whole_groups_for_any_targets() -> None:
    for chosen in SUBSETS:
        form = served(of(chosen), SHAPES, SERVERS["sglang"].joined, "float32")
        for there in leaves_by_part(form):
            assert all(not there & group or there >= group for group in (QKV, GATE_UP)), chosen
        assert {leaf for part in leaves_by_part(form) for leaf in part} <= set(
            targets(SHAPES, {*LEAVES, "lm_head"})
        )


def test_only_layers_that_are_adapted_get_partners() -> None:
    adapter = partial(WHOLE, match_modules(SHAPES, "*.layers.1.*.k_proj"))
    form = served(adapter, SHAPES, SERVERS["sglang"].joined, "float32")
    assert form.config.modules == tuple(f"model.layers.1.self_attn.{leaf}" for leaf in sorted(QKV))


def test_version_already_in_served_form_is_unchanged() -> None:
    assert served(WHOLE, SHAPES, SERVERS["sglang"].joined, "float32") is WHOLE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_form_is_cast_as_torch_casts(dtype: str, tmp_path: Path) -> None:
    values = np.array([[1e-40, 3.0e38, -0.0, 1.00390625, 1.01171875, 65519.0, 1e-8, -2.7182818]], np.float32)
    tensors = {"m.q_proj.lora_A.weight": values, "m.q_proj.lora_B.weight": np.ones((2, 1), np.float32)}
    adapter = Adapter(AdapterConfig(1, 2.0, ("m.q_proj",)), tensors)
    write_peft(served(adapter, {"m.q_proj": (2, 8)}, (), dtype), tmp_path, "base")
    expected = torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()
    read = read_peft(tmp_path)
    assert np.array_equal(read.tensors["m.q_proj.lora_A.weight"], expected) and read.config == adapter.config


@pytest.fixture
async def engine() -> AsyncIterator[BuiltinEngine]:
    compute = Compute()
    engine = BuiltinEngine(load_base(TINY, torch.float32, torch.device("cpu")), compute, TINY)
    yield engine
    await engine.close()
    compute.close()


@pytest.mark.system
async def test_builtin_engine_agrees_with_merged_weights(engine: BuiltinEngine) -> None:
    model = reference_model(TINY)
    weights = {
        name: module.weight for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    for number, chosen in enumerate(SUBSETS):
        adapter = of(chosen)
        await engine.load(f"run@{number}", AdapterSource(adapter.digest(), adapter=adapter))
        added = {module: torch.from_numpy(change) for module, change in changes(adapter).items()}
        with torch.no_grad():
            before = {module: weights[module].clone() for module in added}
            for module, change in added.items():
                weights[module] += change
            expected = reference_logprobs(model, CANARY).numpy()
            for module, weight in before.items():
                weights[module].copy_(weight)
        assert np.abs(await engine.score(f"run@{number}", CANARY) - expected).max() < 1e-4, chosen
        await engine.unload(f"run@{number}")


def test_a_delta_net_is_served_in_parts(tmp_path: Path) -> None:
    """SGLang's parts of Qwen3.5's linears have the rows that config.json says, one A and the same change."""
    write_base(tmp_path, "qwen3_5")
    config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    key, value = (
        config[f"linear_num_{part}_heads"] * config[f"linear_{part}_head_dim"] for part in ("key", "value")
    )
    shapes = read_facts(tmp_path).linears
    server = SERVERS["sglang"]
    for chosen in (["in_proj_qkv"], ["in_proj_z"], ["in_proj_qkv", "in_proj_z", "out_proj"]):
        adapter = random_adapter({name: shapes[name] for name in match_modules(shapes, chosen)}, 1, rank=4)
        form = divided(served(adapter, shapes, server.joined, "float32"), shapes, server.divided["qwen3_5"])
        parts = {name.rpartition(".")[2]: change for name, change in changes(form).items()}
        rows = [len(parts[f"in_proj_{part}"]) for part in "qkvz"]
        assert rows == [key, key, value, value] and key != value
        parts["in_proj_qkv"] = np.concatenate([parts.pop(f"in_proj_{part}") for part in "qkv"])
        for module, change in changes(adapter).items():
            assert np.array_equal(parts.pop(module.rpartition(".")[2]), change)
        assert not any(change.any() for change in parts.values()), chosen
        write_peft(form, tmp_path, "base", server.called)
        named = json.loads((tmp_path / CONFIG).read_text())["target_modules"]
        assert named == sorted({"in_proj_qkvz", *chosen} - {"in_proj_qkv", "in_proj_z"})


def test_a_fused_linear_is_served_in_its_parts() -> None:
    fused = random_adapter({"model.layers.0.mlp.gate_up_proj": (12, 4)}, 1, rank=2, std=0.2)
    parts = changes(divided(fused, {}, SERVERS["vllm"].divided["glm4"]))
    assert [name.rpartition(".")[2] for name in parts] == ["gate_proj", "up_proj"]
    (whole,) = changes(fused).values()
    assert np.array_equal(np.concatenate(list(parts.values())), whole)
