"""Adapters on experts in PEFT's files: PEFT computes with them what lorad does."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file

from lorad.adapters.adapter import PEFT_PREFIX, Adapter
from lorad.adapters.peft import CONFIG, WEIGHTS, outline, read_peft, write_fused, write_peft
from lorad.adapters.readers import refuse_fused, refuse_interleaved, taken_for_experts, why_not
from lorad.adapters.targets import experts_of, match_modules
from lorad.adapters.validate import validate
from lorad.errors import AdapterRefused, SpecError
from lorad.models.facts import read_facts
from lorad.models.families import FUSED
from tests.conformance.expert_adapters import ADAPTERS, BATCH, MOE, SHAPES, adapter_of, merged_logprobs
from tests.conformance.expert_weights import merge
from tests.conformance.reference import reference_logprobs, reference_model
from tests.kit.fakes.random_adapters import partial, random_adapter
from tests.models.bases import FAMILIES, write_base
from tests.models.test_families import make_model

WHOLE = ["experts", "all", "rslora", "low-rank-experts", "high-rank-experts", "low-rank-rslora"]


def written(name: str, directory: Path) -> Path:
    directory.mkdir()
    write_peft(adapter_of(name), directory, str(MOE))
    return directory


def logprobs_of(model: torch.nn.Module) -> np.ndarray:
    found: np.ndarray = reference_logprobs(model, BATCH).detach().numpy()
    return found


def of_peft(directory: Path, base: Path = MOE) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a property that transformers deprecates
        return logprobs_of(PeftModel.from_pretrained(reference_model(base), directory).eval())


@pytest.mark.parametrize("name", ADAPTERS)
def test_ranks_of_experts_are_read_back(name: str, tmp_path: Path) -> None:
    adapter = adapter_of(name)
    again = read_peft(written(name, tmp_path / "adapter"))
    assert again.config == adapter.config and again.digest() == adapter.digest()


@pytest.mark.system(but=["all", "rslora", "high-rank-experts"])
@pytest.mark.parametrize("name", WHOLE)
def test_peft_reads_whole_experts_exactly(name: str, tmp_path: Path) -> None:
    expected = merged_logprobs(adapter_of(name), tmp_path / "merged")
    assert np.abs(of_peft(written(name, tmp_path / "adapter")) - expected).max() < 1e-4


def changed(directory: Path, **changes: Any) -> Path:
    settings = json.loads((directory / CONFIG).read_text()) | changes
    (directory / CONFIG).write_text(json.dumps(settings))
    return directory


EXPERTS = r"experts\.\d+\.\w+"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rank_pattern": {}}, "has shape"),
        ({"rank_pattern": {EXPERTS: 4}}, "has shape"),
        ({"rank_pattern": {EXPERTS: 3, "w1": 3}}, "names w1, which is no module"),
        ({"rank_pattern": {EXPERTS: 3, r"experts\.gate_up_proj": 3}}, "names experts.*gate_up_proj"),
        ({"rank_pattern": {EXPERTS: "3"}}, "no mapping to numbers"),
        ({"rank_pattern": [3]}, "no mapping to numbers"),
        ({"rank_pattern": {"(a+)+b": 3}}, "no name of modules"),
        ({"alpha_pattern": {EXPERTS: 32}}, "another alpha"),
        ({"alpha_pattern": {"q_proj": 8}}, "another alpha"),
        ({"alpha_pattern": {r"experts\.gate_up_proj": 16}}, "names experts.*gate_up_proj"),
    ],
)
def test_patterns_that_mean_something_else_are_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterRefused, match=says) as refused:
        outline(changed(written("low-rank-experts", tmp_path / "adapter"), **change))
    assert refused.value.hint


def test_patterns_of_megatron_bridge_are_read(tmp_path: Path) -> None:
    """It names every linear of every expert, and gives no alpha."""
    adapter = adapter_of("low-rank-experts")
    ranks = dict.fromkeys(adapter.config.experts, 3)
    directory = changed(
        written("low-rank-experts", tmp_path / "adapter"), rank_pattern=ranks, alpha_pattern={}
    )
    assert read_peft(directory).config == adapter.config


def test_ranks_that_differ_among_experts_are_refused(tmp_path: Path) -> None:
    directory = written("experts", tmp_path / "adapter")
    with pytest.raises(AdapterRefused, match="has shape"):
        outline(changed(directory, rank_pattern={r"experts\.1\.up_proj": 4}))


def fused(adapter: Adapter, directory: Path) -> Path:
    directory.mkdir()
    write_fused(adapter, directory, str(MOE), SHAPES)
    return directory


@pytest.mark.system(but=["all", "one-expert", "rslora", "high-rank-experts", "low-rank-up"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_peft_reads_its_own_form_exactly(name: str, tmp_path: Path) -> None:
    expected = merged_logprobs(adapter_of(name), tmp_path / "merged")
    assert np.abs(of_peft(fused(adapter_of(name), tmp_path / "adapter")) - expected).max() < 1e-4


@pytest.mark.parametrize("name", ADAPTERS)
def test_pefts_own_form_is_read_back(name: str, tmp_path: Path) -> None:
    """What was not adapted in a layer is zero."""
    adapter = adapter_of(name)
    again = read_peft(fused(adapter, tmp_path / "adapter"))
    assert (again.config.alpha, again.config.rslora) == (adapter.config.alpha, adapter.config.rslora)
    assert again.config.rank_of_experts == adapter.config.rank_of_experts or not adapter.config.experts
    validate(again, SHAPES)
    for tensor, found in again.tensors.items():
        expected = adapter.tensors.get(tensor)
        assert not found.any() if expected is None else np.array_equal(found, expected)
    assert again.tensors.keys() >= adapter.tensors.keys()


def with_shared_a(adapter: Adapter) -> Adapter:
    gates = {name: name.replace("up_proj.lora_A", "gate_proj.lora_A") for name in adapter.tensors}
    return Adapter(adapter.config, {name: adapter.tensors[gates[name]] for name in adapter.tensors})


def test_one_a_of_gate_and_up_is_kept(tmp_path: Path) -> None:
    adapter = with_shared_a(adapter_of("low-rank-experts"))
    directory = fused(adapter, tmp_path / "adapter")
    tensors = load_file(directory / WEIGHTS)
    assert tensors[f"{PEFT_PREFIX}model.layers.0.mlp.experts.base_layer.lora_A.weight"].shape == (4 * 3, 128)
    assert read_peft(directory).digest() == adapter.digest()
    expected = merged_logprobs(adapter, tmp_path / "merged")
    assert np.abs(of_peft(directory) - expected).max() < 1e-4


def trained_by_peft(directory: Path, *parameters: str, **settings: Any) -> np.ndarray:
    """What PEFT itself trains and saves, with numbers that matter; log-probabilities with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=4, lora_alpha=8, target_parameters=[*parameters], **settings)
        model = get_peft_model(reference_model(MOE), config).eval()
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(parameter, 0.0, 0.1)
        model.save_pretrained(directory)
    return logprobs_of(model)


@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        (["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], {"target_modules": ["q_proj"]}),
        (["gate_up_proj"], {"target_modules": [], "use_rslora": True}),
        (["experts.down_proj"], {"target_modules": ["v_proj"], "rank_pattern": {r".*\.down_proj": 2}}),
        (["model.layers.1.mlp.experts.down_proj"], {"target_modules": ["v_proj"]}),
    ],
)
def test_what_peft_trains_on_experts_is_read(
    parameters: list[str], settings: dict[str, Any], tmp_path: Path
) -> None:
    expected = trained_by_peft(tmp_path / "adapter", *parameters, **settings)
    adapter = read_peft(tmp_path / "adapter")
    validate(adapter, SHAPES)
    assert adapter.config.experts and all(map(experts_of, adapter.config.experts))
    assert np.abs(merged_logprobs(adapter, tmp_path / "merged") - expected).max() < 1e-4


def test_own_form_is_refused_for_interleaved_experts(tmp_path: Path) -> None:
    told = outline(fused(adapter_of("all"), tmp_path / "adapter"))
    refuse_interleaved(told, "qwen3_moe", FUSED)
    with pytest.raises(AdapterRefused, match="not read for gpt_oss"):
        refuse_interleaved(told, "gpt_oss", FUSED)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target_parameters": []}, "do not name what"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "do not name what"),
        ({"target_parameters": ["gate_up_proj", "down_proj", "mlp.gate.weight"]}, "no tensor for mlp.gate"),
        ({"target_parameters": "down_proj"}, "no list of names"),
        ({"alpha_pattern": {}}, "ranks"),
        ({"alpha_pattern": {r"experts\.gate_up_proj": 40}}, "alpha_pattern gives"),
        ({"rank_pattern": {r"experts\.gate_up_proj": 10, r"experts\.down_proj": 3}}, "for a rank of 10"),
    ],
)
def test_own_form_that_means_something_else_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterRefused, match=says) as refused:
        outline(changed(fused(adapter_of("low-rank-experts"), tmp_path / "adapter"), **change))
    assert refused.value.hint


def test_gate_and_up_that_mix_ranks_are_refused(tmp_path: Path) -> None:
    """Its B is no two blocks: experts beside each other in B as in A, as some tools write it."""
    directory = fused(adapter_of("low-rank-experts"), tmp_path / "adapter")
    tensors = load_file(directory / WEIGHTS)
    name = f"{PEFT_PREFIX}model.layers.0.mlp.experts.base_layer.lora_B.weight"
    out = len(tensors[name])
    tensors[name] = np.ascontiguousarray(tensors[name].reshape(out, -1, 4).transpose(0, 2, 1)).reshape(
        out, -1
    )
    save_file(tensors, directory / WEIGHTS)
    with pytest.raises(AdapterRefused, match="same rows of lora_A at twice the rank"):
        read_peft(directory)


def test_outer_halves_that_experts_share_are_refused(tmp_path: Path) -> None:
    """As SGLang's `experts_shared_outer_loras` has them."""
    directory = written("experts", tmp_path / "adapter")
    module = f"{PEFT_PREFIX}model.layers.0.mlp.experts.gate_proj"
    tensors = {f"{module}.lora_A.weight": np.ones((1, 8, 128), np.float32)}
    save_file(tensors | {f"{module}.lora_B.weight": np.ones((4, 192, 8), np.float32)}, directory / WEIGHTS)
    with pytest.raises(AdapterRefused, match="has shape") as refused:
        outline(changed(directory, target_modules=["gate_proj"]))
    assert "shared_outer" in refused.value.hint


def test_packed_experts_of_megatron_bridge_are_refused(tmp_path: Path) -> None:
    """Its halves are the other way round, as PEFT does not read them."""
    directory = fused(with_shared_a(adapter_of("experts")), tmp_path / "adapter")
    tensors = load_file(directory / WEIGHTS)
    turned = {
        name.replace("lora_A", "lora_x").replace("lora_B", "lora_A"): b.T.copy()
        for name, b in tensors.items()
    }
    save_file(
        {name.replace("lora_x", "lora_B"): tensor for name, tensor in turned.items()}, directory / WEIGHTS
    )
    with pytest.raises(AdapterRefused, match="the base needs"):
        validate(read_peft(directory), SHAPES)


OTHERS: dict[str, dict[str, Any]] = {
    "olmoe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "glm4_moe": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
}
OTHERS["glm4_moe"] |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 24}
OTHERS["deepseek_v3"] |= OTHERS["glm4_moe"] | {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
OTHERS["deepseek_v3"] |= {
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("beside", [False, True], ids=["attention", "all"])
def test_peft_reads_other_families_or_they_are_refused(family: str, beside: bool, tmp_path: Path) -> None:
    """GLM-4's and DeepSeek's dense and shared linears have the names of experts', which PEFT mistakes."""
    sizes = {"vocab_size": 128, "max_position_embeddings": 64} | OTHERS[family]
    make_model(tmp_path / "base", family, **sizes)
    facts = read_facts(tmp_path / "base")
    shapes = {**facts.linears, **facts.experts}
    wanted = match_modules(shapes, "all-linear" if beside else "*.self_attn.*,*.experts.*")
    adapter = partial(random_adapter(shapes, 1, 4, expert_rank=2), wanted, rslora=True)
    (tmp_path / "adapter").mkdir()
    write_fused(adapter, tmp_path / "adapter", "", shapes)
    model = reference_model(tmp_path / "base")
    merge(model, adapter)
    apart = np.abs(of_peft(tmp_path / "adapter", tmp_path / "base") - logprobs_of(model)).max()
    if beside and family in ("glm4_moe", "deepseek_v3"):
        assert apart > 0.1
        with pytest.raises(SpecError, match=r"PEFT takes .* for experts"):
            refuse_fused(adapter.config, family)
    else:
        assert apart < 1e-4
        refuse_fused(adapter.config, family)


def test_other_adapters_have_no_form_of_experts() -> None:
    for name, family in (("attention", "qwen3_moe"), ("experts", "mixtral"), ("experts", "")):
        with pytest.raises(SpecError) as refused:
            refuse_fused(adapter_of(name).config, family)
        assert refused.value.key == "--format" and refused.value.hint


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("all", ["PEFT", "sglang", "vllm"]),
        ("rslora", ["PEFT", "vllm"]),
        ("low-rank-experts", ["PEFT", "vllm"]),
        ("one-layer", ["PEFT", "sglang", "vllm"]),
        ("one-expert", []),
        ("gate-up", []),
    ],
)
def test_readers_are_those_that_were_seen_to_agree(name: str, exact: list[str], tmp_path: Path) -> None:
    reasons = why_not(adapter_of(name).config, SHAPES, "qwen3_moe")
    assert [reader for reader, why in reasons.items() if not why] == exact
    if "PEFT" not in exact:
        with pytest.raises((AssertionError, ValueError, RuntimeError, UserWarning)):
            expected = merged_logprobs(adapter_of(name), tmp_path / "merged")
            assert np.abs(of_peft(written(name, tmp_path / "adapter")) - expected).max() < 1e-4


def test_readers_depend_on_the_model() -> None:
    config = adapter_of("all").config
    for family in ("qwen2_moe", "mixtral"):
        assert all(why_not(config, SHAPES, family).values())
    dropped = replace(config, dropout=0.1)
    assert why_not(dropped, SHAPES, "qwen3_moe")["PEFT"] == "it takes no dropout on experts"


@pytest.mark.parametrize(
    ("a", "b"), [((1 << 18, 1), (2, 1 << 18)), ((10**9, 0), (0, 10**9)), ((4, 3), (2, 8))]
)
def test_hostile_pairs_of_experts_are_refused(a: tuple[int, int], b: tuple[int, int], tmp_path: Path) -> None:
    directory = fused(adapter_of("experts"), tmp_path / "adapter")
    changed(directory, r=1, rank_pattern={}, alpha_pattern={}, target_parameters=["down_proj"])
    module = f"{PEFT_PREFIX}model.layers.0.mlp.experts"
    shapes = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, directory / WEIGHTS)
    with pytest.raises(AdapterRefused, match=r"more than|has shapes"):
        outline(directory)


def test_slow_patterns_are_refused_at_once(tmp_path: Path) -> None:
    directory = written("experts", tmp_path / "adapter")
    many = {rf"experts\.\d+\.w{number}": 8 for number in range(1000)}
    for table in ({"(x+x+)+y": 8}, {".*.*.*.*q": 8}, many):
        with pytest.raises(AdapterRefused, match="rank_pattern"):
            outline(changed(directory, rank_pattern=table))


@pytest.mark.filterwarnings("ignore")  # PEFT warns of what it does not find
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "granite4_moe"])
def test_dense_linears_taken_for_experts_are_told(family: str, tmp_path: Path) -> None:
    """PEFT itself shows whether each linear beside the experts gets what the adapter has for it."""
    base, directory = tmp_path / "base", tmp_path / "adapter"
    write_base(base, family)
    directory.mkdir()
    facts = read_facts(base)
    linears = {name: shape for name, shape in facts.linears.items() if name != "lm_head"}
    adapter = random_adapter(linears, 1)
    write_peft(adapter, directory, str(base))
    kind = getattr(transformers, FAMILIES[family][0])
    model = PeftModel.from_pretrained(kind.from_pretrained(base), directory)
    parameters = dict(model.named_parameters())
    lost = [
        name
        for name in linears
        if not any(
            each.endswith(f"{name}.lora_B.default.weight") and p.any() for each, p in parameters.items()
        )
    ]
    assert sorted(taken_for_experts(adapter.config, facts.model_type)) == sorted(lost)
    assert bool(lost) == (family == "qwen3_next")
