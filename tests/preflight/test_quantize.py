"""Rounded bases: who cannot compute with them is refused before anything starts."""

from dataclasses import replace
from typing import Any

import pytest

from lorad.box.config import Config
from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.models.facts import read_facts
from lorad.preflight.backends import check_backends
from lorad.preflight.quantize import check_blocks
from lorad.spec.model import Spec, convert

FACTS = read_facts(resolve("builtin:tiny"))


def spec(quantize: str = "nf4", **more: Any) -> Spec:
    return convert({"data": {"train": "sort"}, "model": {"quantize": quantize}, **more})


@pytest.mark.parametrize("section", ["trainer", "rollout"])
@pytest.mark.parametrize("form", ["nf4", "fp8"])
def test_backends_that_read_checkpoints_are_refused(form: str, section: str) -> None:
    for backend in {"trainer": ("fsdp", "megatron"), "rollout": ("sglang", "vllm")}[section]:
        with pytest.raises(SpecError, match=f"{form}, but {backend} reads the checkpoint itself") as refused:
            check_backends(spec(form, **{section: {"backend": backend}}), Config())
        assert refused.value.key == "model.quantize"
        assert f"{section}.backend: builtin" in str(refused.value.hint)
    check_backends(spec(form), Config())


def test_linears_without_whole_blocks_are_refused() -> None:
    odd = replace(FACTS, linears={**FACTS.linears, "model.layers.0.mlp.up_proj": (3, 100)})
    with pytest.raises(SpecError, match=r"do not divide model\.layers\.0\.mlp\.up_proj \[3, 100\]"):
        check_blocks(spec(), odd)
    check_blocks(spec("fp8"), odd)
    check_blocks(spec(), replace(FACTS, linears={**FACTS.linears, "lm_head": (3, 100)}))
