"""PEFT directories: what is written loads elsewhere, what is read means exactly one adapter."""

import hashlib
import json
import struct
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from lorad.adapters.adapter import MAGNITUDE, PEFT_PREFIX, Adapter, AdapterConfig
from lorad.adapters.peft import CONFIG, WEIGHTS, outline, read_peft, write_peft
from lorad.adapters.validate import refuse_unfit, validate
from lorad.errors import AdapterRefused
from lorad.models.directory import weight_files
from tests.conformance.reference import random_batch, reference_logprobs, reference_model
from tests.kit.fakes.fake_wire import MODULE, digest, write_adapter
from tests.kit.fakes.random_adapters import random_adapter
from tests.kit.pool_kit import TINY

Q0, Q1, UP0 = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.0.mlp.up_proj",
)
SHAPES = {Q0: (6, 4), Q1: (6, 4), UP0: (8, 4), "model.layers.1.mlp.up_proj": (8, 4)}


def an_adapter(*modules: str, rank: int = 2, **config: Any) -> Adapter:
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    for module in sorted(modules or (Q0, Q1)):
        out, width = SHAPES[module]
        tensors[f"{module}.lora_A.weight"] = rng.standard_normal((rank, width), np.float32)
        tensors[f"{module}.lora_B.weight"] = rng.standard_normal((out, rank), np.float32)
    names = tuple(sorted(modules or (Q0, Q1)))
    return Adapter(AdapterConfig(rank=rank, alpha=4.0, modules=names, **config), tensors)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_peft(an_adapter(), tmp_path, "some/base")
    return tmp_path


def settings(directory: Path, **changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / CONFIG).read_text()) | changes
    (directory / CONFIG).write_text(json.dumps(content))
    return content


def rewrite(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file({PEFT_PREFIX + name: array for name, array in tensors.items()}, directory / WEIGHTS)


def refusal(directory: Path) -> str:
    with pytest.raises(AdapterRefused) as refused:
        read_peft(directory)
    assert refused.value.hint
    return str(refused.value)


@pytest.mark.parametrize(
    "adapter", [an_adapter(), an_adapter(Q0, UP0, Q1, rank=1, rslora=True, dropout=0.25)]
)
def test_written_adapter_is_read_back_bit_for_bit(adapter: Adapter, tmp_path: Path) -> None:
    write_peft(adapter, tmp_path, "some/base")
    again = read_peft(tmp_path)
    assert again.config == adapter.config
    assert again.digest() == adapter.digest() == hashlib.sha256((tmp_path / WEIGHTS).read_bytes()).hexdigest()


def test_targets_equal_in_all_layers_become_leaf_names(directory: Path) -> None:
    written = settings(directory)
    assert written["target_modules"] == ["q_proj"]
    assert (written["r"], written["lora_alpha"], written["base_model_name_or_path"]) == (2, 4, "some/base")


@pytest.mark.parametrize("modules", [(Q0, Q1, UP0), (Q1,)])
def test_uneven_targets_are_written_as_full_names(modules: tuple[str, ...], tmp_path: Path) -> None:
    write_peft(an_adapter(*modules), tmp_path, "base")
    assert settings(tmp_path)["target_modules"] == sorted(modules)


def test_targets_beside_towers_are_full_names(tmp_path: Path) -> None:
    """A tower has linears with the same leaf names, some of which PEFT cannot adapt."""
    modules = tuple(f"model.language_model.layers.{layer}.self_attn.q_proj" for layer in range(2))
    write_peft(random_adapter(dict.fromkeys(modules, (8, 8)), 1), tmp_path, "base")
    assert settings(tmp_path)["target_modules"] == [*modules]


def test_many_uneven_targets_are_read_back(tmp_path: Path) -> None:
    """A mixture whose first layer has no experts: the full names of all modules, compared one by one."""
    experts = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in range(1, 12) for e in range(100)]
    modules = tuple(sorted([Q0, *experts]))
    names = [f"{module}.lora_{half}.weight" for module in modules for half in "AB"]
    adapter = Adapter(AdapterConfig(1, 1.0, modules), dict.fromkeys(names, np.ones((1, 1), np.float32)))
    write_peft(adapter, tmp_path, "base")
    assert read_peft(tmp_path).config == adapter.config
    lost = "model.layers.1.mlp.experts.100.up_proj"
    settings(tmp_path, target_modules=[*modules, lost])
    assert f"{lost} is in its target_modules" in lost_tensor(
        tmp_path, dict.fromkeys((*modules, lost), (1, 1))
    )


def a_torch_model(torch: Any) -> Any:
    """A causal model as far as peft looks, with the linears of SHAPES."""
    model = torch.nn.Module()
    for name, (out, width) in SHAPES.items():
        *path, last = name.split(".")
        parent = model
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, torch.nn.Linear(width, out, bias=False))
    model.prepare_inputs_for_generation = None
    return model


@pytest.mark.parametrize("modules", [(Q0, Q1), (Q0, Q1, UP0)])
def test_peft_itself_computes_the_same_with_it(modules: tuple[str, ...], tmp_path: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    adapter = an_adapter(*modules, rslora=True)
    write_peft(adapter, tmp_path, "")
    model = a_torch_model(torch)
    base = {name: model.get_submodule(name).weight.detach().clone() for name in SHAPES}
    merged = peft.PeftModel.from_pretrained(model, str(tmp_path)).merge_and_unload()
    for name, before in base.items():
        a, b = (adapter.tensors.get(f"{name}.lora_{half}.weight") for half in "AB")
        delta = np.zeros(before.shape) if a is None or b is None else adapter.config.scale * b @ a
        after = merged.get_submodule(name).weight
        np.testing.assert_allclose((after - before).detach().numpy(), delta, atol=1e-5)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_is_upcast(dtype: str, directory: Path) -> None:
    values = {name: np.round(array * 8) / 8 for name, array in an_adapter().tensors.items()}
    write_half(directory / WEIGHTS, values, dtype)
    again = read_peft(directory)
    assert all(array.dtype == np.float32 for array in again.tensors.values())
    for name, array in values.items():
        np.testing.assert_array_equal(again.tensors[name], array)


def write_half(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        half = array.astype("<f2") if dtype == "F16" else (array.view(np.uint32) >> 16).astype("<u2")
        span = [len(data), len(data) + half.nbytes]
        header[PEFT_PREFIX + name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": span}
        data += half.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("modules_to_save", ["embed_tokens"]),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 8}),
        ("peft_type", "LOHA"),
        ("init_lora_weights", "pissa_niter_4"),
        ("r", 4),
        ("r", 0),
        ("r", True),
        ("lora_alpha", None),
        ("lora_alpha", -1),
        ("lora_alpha", 1e300),
        ("lora_dropout", "much"),
        ("target_modules", [Q0]),
        ("layers_to_transform", [1]),
        ("layers_to_transform", "all"),
        ("exclude_modules", [Q0]),
        ("target_modules", ["up_proj"]),
        ("target_modules", [3]),
    ],
)
def test_a_setting_that_means_something_else_is_refused(key: str, value: Any, directory: Path) -> None:
    settings(directory, **{key: value})
    refusal(directory)


def lost_tensor(directory: Path, shapes: dict[str, tuple[int, int]] = SHAPES) -> str:
    with pytest.raises(AdapterRefused) as refused:
        refuse_unfit(outline(directory), shapes)
    return str(refused.value)


def test_regular_expressions_of_peft_are_accepted(directory: Path) -> None:
    settings(directory, target_modules=r".*\.q_proj")
    assert read_peft(directory).config.modules == (Q0, Q1)


@pytest.mark.parametrize(
    "names",
    [
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["up_proj"]},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*up_proj"},
        {"target_modules": ["q_proj", "w1", "model.layers.9.mlp.up_proj"]},
        {"target_modules": ["q_proj", UP0], "exclude_modules": ["layers.0.mlp.up_proj"]},
        {"rank_pattern": {"w1": 4}, "alpha_pattern": {"w1": 4}},
    ],
)
def test_what_the_model_lacks_may_be_named(names: dict[str, Any], directory: Path) -> None:
    settings(directory, **names)
    assert refuse_unfit(outline(directory), SHAPES).keys() == an_adapter().tensors.keys()


@pytest.mark.parametrize("target", ["up_proj", UP0, "mlp.up_proj"])
def test_a_named_linear_without_tensors_is_refused(target: str, directory: Path) -> None:
    settings(directory, target_modules=["q_proj", target])
    assert f"{UP0} is in its target_modules and has no tensor" in lost_tensor(directory)


def test_dora_has_a_magnitude_of_every_module(directory: Path) -> None:
    whole = random_adapter({Q0: (6, 4), Q1: (6, 4)}, 0, rank=2, dora=True)
    write_peft(whole, directory, "base")
    found = read_peft(directory)
    assert found.config.dora and found.digest() == whole.digest()
    settings(directory, use_dora=False)
    assert "lora_magnitude_vector is there, but" in refusal(directory)
    settings(directory, use_dora=True)
    rewrite(directory, {name: t for name, t in whole.tensors.items() if name != f"{Q1}.{MAGNITUDE}"})
    assert f"{Q1}.{MAGNITUDE} is missing" in refusal(directory)


def test_dora_on_experts_is_refused(directory: Path) -> None:
    expert = "model.layers.0.mlp.experts.0.up_proj"
    write_peft(random_adapter({expert: (6, 4)}, 0, rank=2, dora=True), directory, "base")
    assert f"use_dora on experts ({expert})" in refusal(directory)


def test_a_missing_half_is_refused_with_its_name(directory: Path) -> None:
    tensors = dict(an_adapter().tensors)
    del tensors[f"{Q1}.lora_B.weight"]
    rewrite(directory, tensors)
    assert f"{Q1}.lora_B.weight is missing" in refusal(directory)


def test_a_missing_layer_is_refused(directory: Path) -> None:
    write_peft(an_adapter(Q0, Q1, UP0, "model.layers.1.mlp.up_proj"), directory, "base")
    rewrite(directory, dict(an_adapter(Q0, Q1, UP0).tensors))
    assert "model.layers.1.mlp.up_proj is in its target_modules" in lost_tensor(directory)


@pytest.mark.parametrize(
    "name", [f"{Q0}.lora_magnitude_vector", f"{Q0}.lora_A.bias", "model.embed_tokens.weight"]
)
def test_tensor_other_than_lora_weights_is_refused(name: str, directory: Path) -> None:
    rewrite(directory, {**an_adapter().tensors, name: np.zeros((2, 4), np.float32)})
    assert name in refusal(directory)


def test_every_truncation_is_refused(directory: Path) -> None:
    whole = (directory / WEIGHTS).read_bytes()
    for length in range(0, len(whole), 7):
        (directory / WEIGHTS).write_bytes(whole[:length])
        refusal(directory)
    (directory / WEIGHTS).write_bytes(whole + b"\0")
    refusal(directory)


def test_flipped_header_bytes_raise_nothing_but_refusals(directory: Path) -> None:
    whole = bytearray((directory / WEIGHTS).read_bytes())
    for position in range(8 + struct.unpack("<Q", whole[:8])[0]):
        damaged = whole.copy()
        damaged[position] ^= 0x11
        (directory / WEIGHTS).write_bytes(damaged)
        try:
            read_peft(directory)
        except AdapterRefused as refused:
            assert str(refused)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}',
    ],
)
def test_a_header_that_lies_is_refused(header: bytes, directory: Path) -> None:
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    refusal(directory)


def test_huge_header_is_refused_before_reading_it(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 62) + bytes(64))
    assert "its header claims" in refusal(directory)


def hostile_header(directory: Path, shapes: dict[str, tuple[int, int]], size: int) -> None:
    """A header of F32 tensors of these shapes, one behind the other, and `size` bytes of zeros."""
    entries: dict[str, Any] = {}
    end = 0
    for name, (rows, columns) in shapes.items():
        start, end = end, end + 4 * rows * columns
        entries[PEFT_PREFIX + name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (directory / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + size)


@pytest.mark.parametrize("trick", ["terabytes", "many", "targets", "path"])
def test_hostile_directory_is_refused_before_weights_are_read(trick: str, directory: Path) -> None:
    a, b = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"
    if trick == "terabytes":
        hostile_header(directory, {a: (2, 10**12), b: (6, 2)}, 64)
    elif trick == "many":  # of as many kinds as layers
        names = [f"model.layers.{i}.k{i}.q_proj.lora_{half}.weight" for i in range(5000) for half in "AB"]
        hostile_header(directory, dict.fromkeys(names, (2, 2)), 16 * len(names))
    else:
        settings(directory, target_modules=["x"] * 10**6 if trick == "targets" else ["../../q_proj"])
    tracemalloc.start()
    lost_tensor(directory)
    assert tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()


def test_an_adapter_that_fits_is_valid() -> None:
    validate(an_adapter(Q0, Q1, UP0), SHAPES)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_refusal_of_nonfinite_value_names_its_tensor(value: float) -> None:
    adapter = an_adapter()
    adapter.tensors[f"{Q1}.lora_B.weight"][3, 1] = value
    with pytest.raises(AdapterRefused, match=rf"{Q1}\.lora_B\.weight holds 1 of 12"):
        validate(adapter, SHAPES)


def test_an_adapter_of_another_base_is_refused() -> None:
    with pytest.raises(AdapterRefused, match=r"shape \[2, 4\], the base needs \[2, 5\]"):
        validate(an_adapter(Q0), {Q0: (6, 5)})
    with pytest.raises(AdapterRefused, match="no linear"):
        validate(an_adapter(Q0), {Q1: (6, 4)})


def test_tensors_and_modules_must_agree() -> None:
    adapter = an_adapter(Q0, Q1)
    fewer = Adapter(an_adapter(Q0).config, adapter.tensors)
    more = Adapter(an_adapter(Q0, Q1, UP0).config, adapter.tensors)
    with pytest.raises(AdapterRefused, match="belongs to none of its modules"):
        validate(fewer, SHAPES)
    with pytest.raises(AdapterRefused, match="is missing"):
        validate(more, SHAPES)


def test_another_dtype_is_refused() -> None:
    adapter = an_adapter(Q0)
    tensors = {name: array.astype(np.float16) for name, array in adapter.tensors.items()}
    with pytest.raises(AdapterRefused, match="float16"):
        validate(Adapter(adapter.config, tensors), SHAPES)


def test_stand_in_writes_the_same_files_as_lorad(tmp_path: Path) -> None:
    half = np.full((1, 4), 7, np.float32)
    tensors = {f"{MODULE}.lora_A.weight": half, f"{MODULE}.lora_B.weight": half.T.copy()}
    for name, write in (
        ("lorad", lambda path: write_peft(Adapter(AdapterConfig(1, 2.0, (MODULE,)), tensors), path, "tiny")),
        ("stand-in", lambda path: write_adapter(path, 7)),
    ):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("lorad", "stand-in")
    ]
    assert (
        files[0] == files[1]
        and digest(7) == hashlib.sha256(files[0]["adapter_model.safetensors"]).hexdigest()
    )


def tiny_with_head(directory: Path, *targets: str, base: Path = TINY, train_head: bool = False) -> Path:
    """What PEFT saves by itself for an adapter on lm_head or embeddings: their weights beside it."""
    with warnings.catch_warnings():
        # PEFT says that the head is tied, and that it saves the embeddings, too
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=[*targets], task_type="CAUSAL_LM"))
        if train_head:
            adapted.get_output_embeddings().base_layer.weight.data[7, 7] += 1.0
        adapted.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_converted_inits_are_adapters_of_twice_the_rank(tmp_path: Path, init: str) -> None:
    """PEFT's model on the base that it changed answers as what is read, on the base as it is."""
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=init, target_modules=["q_proj", "up_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), config).eval()
        adapted.save_pretrained(tmp_path / "init")
        assert init in refusal(tmp_path / "init")
        torch.manual_seed(0)
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.data += 0.05 * torch.randn_like(parameter)
        batch = random_batch(1)
        wanted = reference_logprobs(adapted, batch).detach()
        given = {"path_initial_model_for_weight_conversion": str(tmp_path / "init")}
        adapted.save_pretrained(tmp_path / "plain", **given)
    (tmp_path / "read").mkdir()
    found = read_peft(tmp_path / "plain")
    write_peft(found, tmp_path / "read", str(TINY))
    assert found.config.rank == 8
    mine = reference_logprobs(reference_model(TINY, tmp_path / "read"), batch).detach()
    torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=0)


def test_copy_of_a_base_weight_is_ignored(tmp_path: Path) -> None:
    source = tiny_with_head(tmp_path, "q_proj", "lm_head")
    assert outline(source).copies == ("lm_head",)
    found = read_peft(source, weight_files(TINY))
    assert {name.split(".lora_")[0] for name in found.tensors} == set(found.config.modules)
    assert "lm_head" in found.config.modules


def test_changed_base_weight_is_refused_with_a_hint(tmp_path: Path) -> None:
    source = tiny_with_head(tmp_path, "q_proj", "lm_head", train_head=True)
    for base, says in (
        (weight_files(TINY), "is not that of the base"),
        ([], "of a base that is not known here"),
    ):
        with pytest.raises(AdapterRefused, match=rf"lm_head\.base_layer\.weight .*{says}") as refused:
            read_peft(source, base)
        assert "save_embedding_layers=False" in refused.value.hint


def test_adapted_embedding_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(
        AdapterRefused, match=r"embed_tokens\.lora_embedding_A adapts an embedding"
    ) as refused:
        outline(tiny_with_head(tmp_path, "q_proj", "embed_tokens"))
    assert "target_modules of linears alone" in refused.value.hint
