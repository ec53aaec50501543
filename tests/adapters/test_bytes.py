"""The bytes of an adapter: they are serialised without copies, hashed once, and listed in their directory's
manifest.
"""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save

from lorad.adapters.adapter import Adapter
from lorad.adapters.directory import verify, write_directory
from lorad.adapters.peft import WEIGHTS, read_peft, write_peft
from lorad.adapters.tensors import serialized
from tests.adapters.test_peft_files import an_adapter
from tests.kit.fakes.random_adapters import random_adapter


def test_the_bytes_are_those_that_safetensors_writes() -> None:
    rng = np.random.default_rng(0)
    for case in range(50):
        shapes = [tuple(rng.integers(0, 4, rng.integers(0, 4)).tolist()) for _ in range(case % 7)]
        kinds = rng.choice(["float32", "float64", "float16"], len(shapes))
        tensors = {
            f"ä{rng.integers(1000)}.{index}": np.asarray(rng.normal(size=shape)).astype(kind)
            for index, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))
        }
        assert b"".join(serialized(tensors)) == save(tensors, metadata={"format": "pt"})


def test_only_read_only_tensors_have_a_remembered_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = an_adapter()
    tensor = next(iter(adapter.tensors.values()))
    first = adapter.digest()
    tensor[0, 0] += 1.0
    assert adapter.digest() != first
    for array in adapter.tensors.values():
        array.flags.writeable = False
    frozen = adapter.digest(), adapter.is_finite()
    assert adapter.is_known
    monkeypatch.setattr(Adapter, "parts", None)
    assert (adapter.digest(), adapter.is_finite()) == frozen
    tensor.flags.writeable = True
    with pytest.raises(TypeError):  # it is computed again
        adapter.digest()


def test_what_is_read_can_not_be_written_to(tmp_path: Path) -> None:
    write_peft(an_adapter(), tmp_path, "base")
    read = read_peft(tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        next(iter(read.tensors.values()))[0, 0] = 1.0


def test_manifest_has_the_digest_of_the_adapter(tmp_path: Path) -> None:
    adapter = an_adapter()
    manifest = write_directory(tmp_path / "1", lambda made: write_peft(adapter, made, "base"))
    assert manifest.files[WEIGHTS].sha256 == adapter.digest()
    verify(tmp_path / "1")


def test_the_norm_is_that_of_the_products() -> None:
    experts = "model.layers.0.mlp.experts.0.up_proj"
    adapter = random_adapter({"model.layers.0.self_attn.q_proj": (6, 5), experts: (7, 3)}, 1, expert_rank=2)
    total = 0.0
    for module in adapter.config.modules:
        a, b = (adapter.tensors[f"{module}.lora_{letter}.weight"] for letter in "AB")
        total += float((adapter.config.scale_of(module) ** 2 * (b @ a) ** 2).sum())
    assert adapter.norm() == pytest.approx(total**0.5, rel=1e-5)


def test_the_norm_of_huge_numbers_is_finite() -> None:
    adapter = random_adapter({"model.layers.0.self_attn.q_proj": (6, 5)}, 1)
    huge = replace(adapter, tensors={name: t * np.float32(1e25) for name, t in adapter.tensors.items()})
    assert huge.norm() == pytest.approx(1e50 * adapter.norm())
