"""The families that lorad computes itself against transformers and PEFT, on small random models made here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lorad.errors import SpecError
from lorad.models.base import Base
from lorad.models.config import parse_config
from lorad.models.decoder import hidden, logits
from lorad.models.directory import linear_shapes, read_config
from lorad.models.facts import read_facts
from lorad.models.kv import DecodeAttention, KVCache, PrefillAttention
from lorad.models.loading import load_base
from lorad.models.lora import FrozenLora
from tests.models.test_models import ALL, CPU, lean, peft_tensors, rewrite_config, with_peft

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True, "head_dim": 16},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 16,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 7,
        "swiglu_limit": 1.0,
    },
}
FAMILIES = ["qwen2", "qwen3", "llama", *MIXTURES]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 500.0},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.5},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 100.0,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 0.5},
}


def rope_of(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0} | ROPES[kind] | options


def make_model(directory: Path, family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A random model in `directory`; every number of it matters, and logits have a scale of about 10."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    more = MIXTURES.get(family, {} if family == "qwen2" else {"head_dim": 16})
    shard = options.pop("shard", "1GB")
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(sizes | heads | more | options))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    for name, buffer in model.named_buffers():
        if "score" in name:
            torch.nn.init.normal_(buffer, 0.0, 0.2)
    model.save_pretrained(directory, max_shard_size=shard)
    return model


def long_ids() -> torch.Tensor:
    """Nearly as long as the model allows: scaled and plain frequencies are far apart there."""
    return torch.randint(0, 64, (2, 60), generator=torch.Generator().manual_seed(1))


def of_transformers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(long_ids()).logits.float()  # type: ignore[no-any-return]


def numbers_in(model: Any) -> int:
    """Those of a checkpoint: parameters, and the bias of scores, which is none."""
    biases = [buffer for name, buffer in model.named_buffers() if "score" in name]
    return sum(tensor.numel() for tensor in [*model.parameters(), *biases])


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Base:
    return load_base(directory, dtype, CPU)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(tmp_path: Path, family: str, rope: str, tied: bool) -> None:
    model = make_model(tmp_path, family, tie_word_embeddings=tied, rope_parameters=rope_of(rope))
    base = load(tmp_path)
    assert (lean(base, long_ids()) - of_transformers(model)).abs().max() < 1e-4
    assert base.config.num_parameters == numbers_in(model)
    assert read_facts(tmp_path).bytes("float32") == 4 * base.config.num_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_with_the_cache_equals_the_full_forward(tmp_path: Path, family: str) -> None:
    make_model(tmp_path, family, rope_parameters=rope_of("yarn"), num_key_value_heads=1)
    base, ids = load(tmp_path), long_ids()
    full, cache = lean(base, ids), KVCache(base, slots=2, length=60)
    with torch.no_grad():
        hidden(base, ids[:, :50], torch.arange(50), PrefillAttention(cache))
        for now in (torch.tensor([50, 41]), torch.tensor([51, 42])):
            attention = DecodeAttention(cache, now, int(now.max()) + 1)
            step = logits(base, hidden(base, ids[torch.arange(2), now][:, None], now[:, None], attention))[
                :, 0
            ]
            assert (step - full[torch.arange(2), now]).abs().max() < 1e-4


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"attention_bias": True}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen2_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    ("qwen2_moe", {"qkv_bias": False}),
    ("olmoe", {"attention_bias": True, "norm_topk_prob": True}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "n_group": 1, "topk_group": 1}),
    ("glm4_moe", {"first_k_dense_replace": 0, "norm_topk_prob": False}),
    ("glm4_moe", {"first_k_dense_replace": 2}),
    ("gpt_oss", {"attention_bias": False, "layer_types": ["full_attention", "sliding_attention"]}),
    ("gpt_oss", {"swiglu_alpha": 1.2, "sliding_window": 1}),
]


@pytest.mark.parametrize(("family", "options"), OPTIONS)
def test_options_are_computed_as_in_transformers(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    model = make_model(tmp_path, family, **options)
    base = load(tmp_path)
    assert (lean(base, long_ids()) - of_transformers(model)).abs().max() < 1e-4
    assert base.config.num_parameters == numbers_in(model)


@pytest.mark.parametrize("family", MIXTURES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    whole = AutoConfig.for_model(family, num_attention_heads=32, num_hidden_layers=3).to_dict()
    named = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    short = {key: whole[key] for key in ("model_type", "max_position_embeddings", *named)}
    assert parse_config(short, "short") == parse_config(whole, "whole")
    assert parse_config(short | {"rope_parameters": None}, "null") == parse_config(whole, "whole")


def test_layers_that_predict_later_tokens_are_not_computed(tmp_path: Path) -> None:
    expected = of_transformers(make_model(tmp_path, "glm4_moe"))
    rewrite_weights(tmp_path, "model.layers.2.eh_proj.weight", torch.zeros(32, 64))
    assert (lean(load(tmp_path), long_ids()) - expected).abs().max() < 1e-4
    rewrite_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(SpecError, match=r"layers\.2\.eh_proj"):
        load(tmp_path)


def test_active_parameters_leave_idle_experts_out(tmp_path: Path) -> None:
    """One of two layers has 8 experts of 3 x 24 x 32 numbers, of which a token meets 3."""
    make_model(tmp_path, "glm4_moe")
    facts = read_facts(tmp_path)
    assert facts.parameters - facts.active == 5 * 3 * 24 * 32
    assert facts.linears["model.layers.0.mlp.down_proj"] == (32, 48)
    assert facts.linears["model.layers.1.mlp.shared_experts.down_proj"] == (32, 48)
    assert facts.experts["model.layers.1.mlp.experts.7.down_proj"] == (32, 24)
    assert (len(facts.experts), facts.expert_count) == (8 * 3, 8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
def test_bfloat16_is_as_exact_as_in_transformers(tmp_path: Path, family: str, rope: str) -> None:
    """Both round at other places (fused matmuls, the order of sums), so neither is nearer to the other than
    both are to float32 with the same weights: that distance, of transformers' own bfloat16, is the size of
    the noise. The factor leaves room for the spread of one sample; a wrong bias, norm or frequency is an
    error many times as large. Tokens go through all experts: else those for which two score nearly the same
    would be sent elsewhere, and what follows them would differ by more than rounding.
    """
    every = {"num_experts_per_tok": 4} if family in MIXTURES else {}
    if family == "glm4_moe":
        every = {"num_experts_per_tok": 8, "topk_group": 4}
    half = make_model(tmp_path, family, torch.bfloat16, rope_parameters=rope_of(rope), **every)
    noisy, exact = of_transformers(half), of_transformers(half.float())
    ours = lean(load(tmp_path, torch.bfloat16), long_ids()).float()
    noise = (noisy - exact).square().mean().sqrt()
    assert (ours - exact).square().mean().sqrt() < 1.5 * noise
    alike = torch.cosine_similarity(ours, exact, dim=-1)
    assert alike.min() > (0.99 if family in MIXTURES else 0.999)
    # and a bfloat16 checkpoint loads in float32
    assert (lean(load(tmp_path), long_ids()) - exact).abs().max() < 1e-4


def test_a_float16_checkpoint_loads_in_float32_and_bfloat16(tmp_path: Path) -> None:
    expected = of_transformers(make_model(tmp_path, "llama", torch.float16).float())
    assert (lean(load(tmp_path), long_ids()) - expected).abs().max() < 1e-4
    assert (
        torch.cosine_similarity(lean(load(tmp_path, torch.bfloat16), long_ids()).float(), expected, -1).min()
        > 0.999
    )


def older(rope: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The same as a config of transformers 4 says it."""
    scaling = {
        "type" if key == "rope_type" else key: value for key, value in rope.items() if key != "rope_theta"
    }
    return {"rope_parameters": None, "rope_theta": rope["rope_theta"], "rope_scaling": scaling} | options


@pytest.mark.parametrize("rope", ROPES)
def test_rope_scaling_beside_rope_theta_means_the_same(tmp_path: Path, rope: str) -> None:
    make_model(tmp_path, "llama", rope_parameters=rope_of(rope))
    now = read_config(tmp_path)
    rewrite_config(tmp_path, **older(rope_of(rope)))
    assert read_config(tmp_path) == now


@pytest.mark.parametrize("family", FAMILIES)
def test_model_type_stands_in_for_architectures(tmp_path: Path, family: str) -> None:
    make_model(tmp_path, family)
    there = read_config(tmp_path)
    rewrite_config(tmp_path, architectures=None)
    assert read_config(tmp_path) == there


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_are_one_model(tmp_path: Path, family: str) -> None:
    model = make_model(tmp_path, family, shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert (lean(load(tmp_path), long_ids()) - of_transformers(model)).abs().max() < 1e-4


def rewrite_weights(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Puts one tensor into the file, or takes it out."""
    tensors = load_file(directory / "model.safetensors")
    tensors.pop(name, None)
    more = {} if tensor is None else {name: tensor}
    save_file(tensors | more, directory / "model.safetensors", {"format": "pt"})


def test_old_frequency_tensors_of_llama_are_ignored(tmp_path: Path) -> None:
    expected = of_transformers(make_model(tmp_path, "llama"))
    rewrite_weights(tmp_path, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8))
    assert (lean(load(tmp_path), long_ids()) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "lost"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("llama", "lm_head.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, family: str, lost: str) -> None:
    make_model(tmp_path, family)
    rewrite_weights(tmp_path, lost, None)
    with pytest.raises(SpecError, match=lost):
        load(tmp_path)


def test_unused_tensor_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", attention_bias=True)
    rewrite_config(tmp_path, attention_bias=False)
    with pytest.raises(SpecError, match=r"8 tensors .*k_proj\.bias"):
        load(tmp_path)


def test_stored_copies_of_tied_embeddings_must_agree(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen2", tie_word_embeddings=True)
    embed = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite_weights(tmp_path, "lm_head.weight", embed.clone())
    assert load(tmp_path).head is not None
    rewrite_weights(tmp_path, "lm_head.weight", embed + 1)
    with pytest.raises(SpecError, match=r"lm_head\.weight differs"):
        load(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_on_every_linear_equals_peft(tmp_path: Path, family: str) -> None:
    """Of mixtures PEFT takes those of the attention; for the rest see `test_experts.py`."""
    linears = ALL[:4] if family in MIXTURES else ALL
    wrapped = with_peft(make_model(tmp_path, family), [*linears, "lm_head"])
    base = load(tmp_path)
    tensors = peft_tensors(wrapped)
    assert {name.removesuffix(".lora_A.weight") for name in tensors if "lora_A" in name} == {
        name for name in linear_shapes(base.config) if name.rpartition(".")[2] in (*linears, "lm_head")
    }
    lora = FrozenLora(base, tensors, 2.0)
    assert (lean(base, long_ids(), lora) - of_transformers(wrapped)).abs().max() < 2e-4
    assert (lean(base, long_ids()) - of_transformers(wrapped)).abs().max() > 1e-2


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
    ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
    ({"architectures": None, "model_type": "gemma3_text"}, "gemma3_text"),
    ({"model_type": "mistral"}, "Qwen2ForCausalLM of model_type mistral"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope type longrope"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [4, 4]}}, "rope type mrope"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor is None"),
    (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1}},
        "high_freq_factor is None",
    ),
    ({"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "factor is '4'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "differs by layer"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
    (
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "sliding",
    ),
    ({"hidden_act": "gelu"}, "hidden_act gelu"),
    ({"num_key_value_heads": 3}, "3 kv heads"),
    ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ({"hidden_size": None}, "hidden_size"),
]


@pytest.mark.parametrize(("changes", "named"), CHANGES, ids=[named for _, named in CHANGES])
def test_unsupported_settings_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    make_model(tmp_path, "qwen2")
    rewrite_config(tmp_path, **changes)
    with pytest.raises(SpecError, match=named) as caught:
        read_config(tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("mixtral", {"sliding_window": 8}, "sliding"),
        ("qwen2_moe", {"layer_types": None, "use_sliding_window": True, "sliding_window": 8}, "sliding"),
        ("glm4_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, of 8 experts in 4 groups, 2 of"),
        ("glm4_moe", {"n_group": 3}, "8 experts in 3 groups"),
        ("gpt_oss", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "for 2 layers"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window is None"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization mxfp4"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts is 0"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor 1.5"),
    ],
)
def test_mixtures_that_are_not_computed_are_named(
    tmp_path: Path, family: str, changes: dict[str, Any], named: str
) -> None:
    make_model(tmp_path, family)
    rewrite_config(tmp_path, **changes)
    with pytest.raises(SpecError, match=named):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    ],
)
def test_unused_sliding_window_changes_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    make_model(tmp_path, "qwen2", **changes)
    rewrite_config(tmp_path, layer_types=None, **changes)
    expected = of_transformers(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert (lean(load(tmp_path), long_ids()) - expected).abs().max() < 1e-4


def test_the_supported_architectures_are_listed_in_the_refusal() -> None:
    with pytest.raises(SpecError) as caught:
        parse_config({"architectures": ["GPT2LMHeadModel"]}, "config.json")
    assert all(
        name in caught.value.hint for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
    )
