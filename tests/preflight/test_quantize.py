"""Rounded bases: who cannot compute with them is refused before anything starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorad.box.config import Config
from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.models.facts import read_facts
from lorad.preflight.__main__ import preflight
from lorad.preflight.backends import check_backends
from lorad.preflight.directory import check_blocks
from lorad.spec.model import Spec, convert
from tests.models.test_families import make_model

FACTS = read_facts(resolve("builtin:tiny"))


def spec(quantize: str = "nf4", path: str = "builtin:tiny", **more: Any) -> Spec:
    return convert({"data": {"train": "sort"}, "model": {"path": path, "quantize": quantize}, **more})


@pytest.mark.parametrize("section", ["trainer", "rollout"])
@pytest.mark.parametrize("form", ["nf4", "fp8"])
def test_backends_that_read_checkpoints_are_refused(form: str, section: str) -> None:
    for backend in {"trainer": ("megatron",), "rollout": ("sglang", "vllm")}[section]:
        chosen: dict[str, Any] = {section: {"backend": backend}}
        with pytest.raises(SpecError, match=f"{form}, but {backend} reads the checkpoint itself") as refused:
            check_backends(spec(form, **chosen), Config())
        assert refused.value.key == "model.quantize"
        assert f"{section}.backend: builtin" in str(refused.value.hint)
    check_backends(spec(form), Config())
    check_backends(spec(form, trainer={"backend": "fsdp"}), Config())


def test_linears_without_whole_blocks_are_refused() -> None:
    odd = replace(FACTS, linears={**FACTS.linears, "model.layers.0.mlp.up_proj": (3, 100)})
    with pytest.raises(SpecError, match=r"do not divide model\.layers\.0\.mlp\.up_proj \[3, 100\]"):
        check_blocks(spec(), odd)
    check_blocks(spec("fp8"), odd)
    check_blocks(spec(), replace(FACTS, linears={**FACTS.linears, "lm_head": (3, 100)}))


def test_fused_experts_are_not_rounded() -> None:
    with pytest.raises(SpecError, match="tensors of all experts") as refused:
        check_blocks(spec("fp8"), replace(FACTS, model_type="gpt_oss"))
    assert refused.value.key == "model.quantize"


def test_model_of_odd_width_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "odd", "qwen3", intermediate_size=33)
    with pytest.raises(SpecError, match=r"mlp\.gate_proj \[33, 32\]"):
        preflight(spec(path=str(tmp_path / "odd")), cwd=tmp_path)


@pytest.mark.parametrize(("form", "saved"), [("nf4", 4 - 0.5625), ("fp8", 4 - 1 - 4 / 128)])
def test_memory_is_counted_as_packed(form: str, saved: float, tmp_path: Path) -> None:
    plain, packed = (preflight(convert({"model": m}), cwd=tmp_path) for m in ({}, {"quantize": form}))
    numbers = sum(out * inputs for out, inputs in FACTS.linears.values())
    assert plain.memory_needed - packed.memory_needed == pytest.approx(saved * numbers, rel=0.01)
