"""A base and an adapter as one model: what is written, and what the check finds."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.adapters.directory import verify
from lorad.adapters.peft import read_peft, write_peft
from lorad.errors import Conflict, IntegrityError, SpecError, StorageError
from lorad.models import merged_files
from lorad.models.directory import BUILTIN, INDEX, linear_shapes, read_config, read_json
from lorad.models.facts import tensor_places
from lorad.models.lora import FrozenLora
from lorad.models.merged_files import Merged, write_merged
from tests.kit.fakes.random_adapters import random_adapter
from tests.models.test_families import MIXTURES, load, long_ids, make_model, of_transformers
from tests.models.test_models import lean

TINY = BUILTIN["builtin:tiny"]
TOKENS = torch.tensor([[5, 9, 30, 41, 7, 12]])


def an_adapter(scale: float = 0.02, rank: int = 4) -> Adapter:
    shapes, draw = linear_shapes(read_config(TINY)), np.random.default_rng(0)
    tensors = {}
    for module, (rows, columns) in shapes.items():
        for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            tensors[f"{module}.lora_{half}.weight"] = draw.normal(0, scale, shape).astype(np.float32)
    return Adapter(AdapterConfig(rank, 16.0, tuple(sorted(shapes))), dict(sorted(tensors.items())))


def merge(adapter: Adapter, base: Path, target: Path) -> Merged:
    return write_merged(adapter, base, target, lambda directory: None)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The tiny base in bfloat16, over several files."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="300KB")
    assert (tmp_path / "sharded" / INDEX).exists()
    return tmp_path / "sharded"


@pytest.mark.parametrize("dora", [False, True])
def test_merged_model_answers_as_base_with_adapter(tmp_path: Path, dora: bool) -> None:
    adapter = random_adapter(linear_shapes(read_config(TINY)), 0, dora=True) if dora else an_adapter()
    (tmp_path / "adapter").mkdir()
    write_peft(adapter, tmp_path / "adapter", str(TINY))
    merged = merge(adapter, TINY, tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(TINY)
    with torch.no_grad():
        before = base(TOKENS).logits
        wanted = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(TOKENS).logits
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(TOKENS).logits
    assert merged.changed == 21
    assert (found - wanted).abs().max() < 1e-4 < (wanted - before).abs().max()


def test_experts_in_one_tensor_are_not_merged(tmp_path: Path) -> None:
    make_model(tmp_path, "gpt_oss")
    adapter = random_adapter(linear_shapes(read_config(tmp_path)), 1)
    with pytest.raises(SpecError, match="in one tensor") as caught:
        merge(adapter, tmp_path, tmp_path / "merged")
    assert "without --merge" in caught.value.hint and not (tmp_path / "merged").exists()


@pytest.mark.parametrize("family", [family for family in MIXTURES if family != "gpt_oss"])
def test_merged_mixtures_answer_as_base_with_adapter(tmp_path: Path, family: str) -> None:
    base, merged = tmp_path / "base", tmp_path / "merged"
    before = of_transformers(make_model(base, family))
    adapter = random_adapter(linear_shapes(read_config(base)), 1)
    (tmp_path / "adapter").mkdir()
    write_peft(adapter, tmp_path / "adapter", str(base))
    assert read_peft(tmp_path / "adapter").digest() == adapter.digest()
    merge(adapter, base, merged)
    lora = FrozenLora(load(base), adapter.tensors, adapter.config.scale)
    wanted = of_transformers(AutoModelForCausalLM.from_pretrained(merged))
    assert (lean(load(base), long_ids(), lora) - wanted).abs().max() < 1e-3 < (wanted - before).abs().max()
    assert (lean(load(merged), long_ids()) - wanted).abs().max() < 1e-4


def test_shards_in_bfloat16_are_rounded_once(tmp_path: Path, sharded: Path) -> None:
    adapter = an_adapter()
    merge(adapter, sharded, tmp_path / "merged")
    files = set(read_json(sharded / INDEX)["weight_map"].values())
    before, after = (
        {k: v for f in files for k, v in load_file(d / f).items()} for d in (sharded, tmp_path / "merged")
    )
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        wanted = weight
        if module in adapter.config.modules:
            a, b = (torch.from_numpy(adapter.tensors[f"{module}.lora_{half}.weight"].copy()) for half in "AB")
            wanted = (weight.float() + 4.0 * b @ a).to(torch.bfloat16)
        difference = (after[name].float() - wanted.float()).abs()
        assert difference.max() <= wanted.float().abs().max() * 2**-8
        assert (difference > 0).float().mean() < 1e-3  # a sum in another order, at a tie


def test_small_adapter_is_reported_as_rounded_away(tmp_path: Path, sharded: Path) -> None:
    assert merge(an_adapter(1e-4), sharded, tmp_path / "small").rounding > 0.9
    assert merge(an_adapter(0.1), sharded, tmp_path / "large").rounding < 0.1


@pytest.mark.parametrize("fault", ["scale", "rows", "other"])
def test_wrong_weights_are_found_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    right = merged_files._merged

    def wrong(rows: bytes, target: merged_files._Target, start: int) -> bytes:
        if fault == "scale":
            return right(rows, target._replace(b=target.b * np.float32(1.01)), start)
        return right(rows, target._replace(b=target.b[::-1]), start)

    flips = fault == "other"  # a byte of a weight that the adapter does not change
    if not flips:
        monkeypatch.setattr(merged_files, "_merged", wrong)
    with pytest.raises(IntegrityError, match="is not"):
        write_merged(an_adapter(), TINY, tmp_path / "merged", _flip_a_byte if flips else lambda _: None)
    assert list(tmp_path.iterdir()) == []


def _flip_a_byte(directory: Path) -> None:
    weights = directory / "model.safetensors"
    place = tensor_places(weights)["model.norm.weight"]
    data = bytearray(weights.read_bytes())
    data[place.start] ^= 1
    weights.write_bytes(data)


def test_what_cannot_be_merged_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    shutil.copytree(TINY, base)
    tensors = load_file(base / "model.safetensors")
    save_file({k: v[:-1] if "down_proj" in k else v for k, v in tensors.items()}, base / "model.safetensors")
    with pytest.raises(SpecError, match=r"down_proj\.weight has shape"):
        merge(an_adapter(), base, tmp_path / "merged")
    head = Adapter(
        AdapterConfig(1, 1.0, ("lm_head",)),
        {"lm_head.lora_A.weight": np.ones((1, 128), "f4"), "lm_head.lora_B.weight": np.ones((128, 1), "f4")},
    )
    with pytest.raises(SpecError, match="shares its weight with the embeddings"):
        merge(head, TINY, tmp_path / "merged")
    with pytest.raises(Conflict):
        merge(an_adapter(), TINY, base)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(StorageError, match=r"0\.00 GB are free"):
        merge(an_adapter(), TINY, tmp_path / "merged")


def test_merged_model_is_a_base_for_the_next(tmp_path: Path) -> None:
    """Neither its manifest nor an adapter that lies beside a base comes along."""
    merge(an_adapter(), TINY, tmp_path / "first")
    (tmp_path / "first" / "adapter_config.json").write_text("{}")
    merge(an_adapter(), tmp_path / "first", tmp_path / "second")
    assert "adapter_config.json" not in verify(tmp_path / "second")


def test_memory_does_not_grow_with_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes come of one row at a time."""
    merge(an_adapter(), TINY, tmp_path / "at_once")
    monkeypatch.setattr(merged_files, "_ROWS_BYTES", 4 * 128)
    merge(an_adapter(), TINY, tmp_path / "by_rows")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("at_once", "by_rows"))
    assert all((one[name] - other[name]).abs().max() < 1e-6 for name in one)
