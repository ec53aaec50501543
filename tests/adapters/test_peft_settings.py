"""Every key of PEFT's LoraConfig: lorad computes with it what PEFT does, or refuses it in words."""

import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PeftType, get_peft_model
from peft.tuners.lora.config import VeloraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lorad.adapters.peft import CONFIG, WEIGHTS, outline, read_peft, write_peft
from lorad.adapters.settings import READ, WITHOUT_EFFECT
from lorad.adapters.validate import refuse_unfit, validate
from lorad.errors import AdapterRefused
from lorad.models.directory import linear_shapes, read_config, weight_files
from tests.conformance.reference import random_batch, reference_logprobs, reference_model
from tests.kit.pool_kit import TINY

SHAPES = linear_shapes(read_config(TINY))
TARGETS = ["q_proj", "down_proj"]
MADE: dict[str, dict[str, Any]] = {  # what PEFT makes with a value of a key, and lorad computes as PEFT does
    "r": {"r": 2},
    "lora_alpha": {"lora_alpha": 5},
    "lora_dropout": {"lora_dropout": 0.3},
    "use_rslora": {"use_rslora": True},
    "use_dora": {"use_dora": True},
    "target_modules": {"target_modules": r".*layers\.1\..*(q|up)_proj"},
    "exclude_modules": {"exclude_modules": ["q_proj"]},
    "layers_to_transform": {"layers_to_transform": [1, 7]},
    "layers_pattern": {"layers_to_transform": 0, "layers_pattern": "layers"},
    "rank_pattern": {"rank_pattern": {"q_proj": 6, "down_proj": 6, "no_such": 3}},
    "alpha_pattern": {"alpha_pattern": {"no_such": 3}},
    "init_lora_weights": {"init_lora_weights": "orthogonal"},
    "velora_config": {"velora_config": VeloraConfig(num_groups=4)},
    "task_type": {"task_type": None},
    "revision": {"revision": "main"},
    "inference_mode": {"inference_mode": True},
    "qalora_group_size": {"qalora_group_size": 8},
    "megatron_core": {"megatron_core": "elsewhere"},
    "ensure_weight_tying": {"ensure_weight_tying": True},
    "target_parameters": {"target_parameters": []},
}
WRITTEN: dict[str, Any] = {  # what PEFT writes by itself, or writes with data that a test has not
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True},
    "peft_version": "0.1",
    "base_model_name_or_path": "elsewhere",
    "runtime_config": {"ephemeral_gpu_offload": True},
    "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "ipm"},
    "lora_ga_config": {"direction": "ArB2r"},
}
REFUSED: dict[str, Any] = {
    "peft_type": "IA3",
    "bias": "lora_only",
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "layer_replication": [[0, 2], [1, 2]],
    "trainable_token_indices": [3],
    "use_qalora": True,
    "fan_in_fan_out": True,
    "alora_invocation_tokens": [7, 8],
    "kasa_config": {"beta": 1e-4},
    "use_bdlora": {"nblocks": 1},
    "monteclora_config": {"num_samples": 2},
    "arrow_config": {"top_k": 3},
    "megatron_config": {"num_layers": 2},
}


def made(directory: Path, **settings: Any) -> Path:
    """Have PEFT make an adapter of random numbers and save it."""
    usual = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about keys of patterns, and weights that are tied
        base = AutoModelForCausalLM.from_pretrained(TINY)
        model = get_peft_model(base, LoraConfig(**(usual | settings)))
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(directory)
    return directory


def amend(directory: Path, **settings: Any) -> Path:
    path = directory / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return directory


def of_peft(directory: Path) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(reference_model(TINY), directory).eval()
        return reference_logprobs(model, random_batch(1)).detach()


def of_lorad(directory: Path, room: Path) -> torch.Tensor:
    """What lorad read, written as a plain LoRA."""
    refuse_unfit(outline(directory), SHAPES)
    adapter = read_peft(directory, weight_files(TINY))
    validate(adapter, SHAPES)
    room.mkdir()
    write_peft(adapter, room, str(TINY))
    return of_peft(room)


def refusal(directory: Path) -> str:
    with pytest.raises(AdapterRefused) as refused:
        refuse_unfit(outline(directory), SHAPES)
    assert refused.value.hint
    return refused.value.in_full


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("plain") / "adapter")


@pytest.fixture
def adapter(plain: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "adapter"
    directory.mkdir()
    for name in (CONFIG, WEIGHTS):
        (directory / name).write_bytes((plain / name).read_bytes())
    return directory


def test_every_key_of_peft_is_known() -> None:
    """A key of a new PEFT belongs into a table of settings.py, and into one of those above."""
    names = {field.name for field in fields(LoraConfig)}
    assert names == {*MADE, *WRITTEN, *REFUSED}
    assert {*MADE, *WRITTEN} - {"layers_pattern"} <= READ | WITHOUT_EFFECT
    assert not {*REFUSED} & (READ | WITHOUT_EFFECT)


@pytest.mark.parametrize("key", MADE)
def test_what_is_read_computes_as_peft_does(key: str, tmp_path: Path) -> None:
    source = made(tmp_path / "made", **MADE[key])
    torch.testing.assert_close(of_lorad(source, tmp_path / "read"), of_peft(source), atol=1e-4, rtol=0)


@pytest.mark.parametrize("key", WRITTEN)
def test_how_it_was_trained_changes_nothing(key: str, adapter: Path, plain: Path) -> None:
    read = read_peft(amend(adapter, **{key: WRITTEN[key]}))
    assert (read.config, read.digest()) == (read_peft(plain).config, read_peft(plain).digest())


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_computed_is_refused_by_name(key: str, adapter: Path) -> None:
    text = refusal(amend(adapter, **{key: REFUSED[key]}))
    assert f"{key} is" in text and "unknown here" not in text


@pytest.mark.parametrize("kind", sorted(set(PeftType) - {PeftType.LORA}))
def test_other_types_of_peft_are_refused(kind: str, adapter: Path) -> None:
    assert f"peft_type is '{PeftType(kind).value}'" in refusal(amend(adapter, peft_type=PeftType(kind).value))


def test_unknown_key_is_refused_when_it_says_something(adapter: Path) -> None:
    outline(amend(adapter, of_tomorrow=None, another=False, groups=[], lorap_emb_lr=1e-6))
    assert "of_tomorrow is {'groups': 4}" in refusal(amend(adapter, of_tomorrow={"groups": 4}))
    assert len(refusal(amend(adapter, of_tomorrow="x" * 100_000))) < 1000


@pytest.mark.parametrize("start", ["pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "of-tomorrow"])
def test_starts_that_change_the_base_are_refused(start: str, adapter: Path) -> None:
    assert start in refusal(amend(adapter, init_lora_weights=start))


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "mica", "orthogonal"])
def test_starts_that_leave_the_base_are_read(start: str | bool, adapter: Path) -> None:
    assert read_peft(amend(adapter, init_lora_weights=start)).config.rank == 4


def test_all_that_is_wrong_is_told_at_once(adapter: Path) -> None:
    text = refusal(amend(adapter, bias="all", alora_invocation_tokens=[1], lora_alpha=None, of_tomorrow=1))
    words = ("bias is 'all'", "alora_invocation_tokens is", "lora_alpha is missing", "of_tomorrow is 1")
    assert all(word in text for word in words)


PREFIX = "base_model.model."
LAYERS = f"{PREFIX}model.layers"


@pytest.mark.parametrize(
    ("old", "new", "advice"),
    [
        (PREFIX, "", "lacks PEFT's prefix"),
        (PREFIX, f"module.{PREFIX}", "write the names without module."),
        (PREFIX, f"_fsdp_wrapped_module.{PREFIX}", "write the names without _fsdp_wrapped_module."),
        (LAYERS, f"{PREFIX}_orig_mod.model.layers", "write the names without _orig_mod."),
        (LAYERS, f"{PREFIX}model._fsdp_wrapped_module.layers", "without _fsdp_wrapped_module."),
        (LAYERS, f"{PREFIX}model.language_model.layers", "the base calls it model.layers.0."),
        (LAYERS, f"{PREFIX}language_model.model.layers", "the base calls it model.layers.0."),
        (LAYERS, f"{PREFIX}layers", "the base calls it model.layers.0."),
        (PREFIX, PREFIX * 2, "write the names with base_model.model. once"),
        (".weight", ".default.weight", "the name of PEFT's adapter"),
        ("lora_A.weight", "lora_A.0.weight", "put the parts of all ranks together"),
        ("lora_A.weight", "rank_0.lora_A", "put the parts of all ranks together"),
        ("lora_A.weight", "lora_A.bias", "lora_bias=False"),
        ("lora_A.weight", "lora_embedding_A", "adapts an embedding"),
        ("lora_A.weight", "lora_a", "as mlx and torchtune do"),
        ("lora_A.weight", "adapter.linear_in.weight", "Megatron-Bridge"),
        ("lora_A.weight", "lora_down.weight", "models of images"),
        (f"{LAYERS}.0.", "lora_unet_0_", "models of images"),
        ("lora_A.weight", "weight", "give a whole model as model.path"),
        ("lora_A.weight", "modules_to_save.weight", "modules_to_save=None"),
        ("lora_A.weight", "sth", "is no LoRA weight"),
    ],
)
def test_names_of_other_tools_get_advice(old: str, new: str, advice: str, adapter: Path) -> None:
    path = adapter / WEIGHTS
    save_file({name.replace(old, new): tensor for name, tensor in load_file(path).items()}, path)
    assert advice in refusal(adapter)


def test_adapter_of_mlx_is_refused_by_name(adapter: Path) -> None:
    (adapter / CONFIG).write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": {"rank": 8}}))
    assert "an adapter of mlx" in refusal(adapter)


def test_the_directory_above_names_the_last_checkpoint(adapter: Path) -> None:
    (adapter.parent / "adapter-0").mkdir()
    assert f"it may be {adapter}" in refusal(adapter.parent)
