"""Adapters on experts in PEFT's files: PEFT computes with them what lorad does."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel

from lorad.adapters.peft import CONFIG, outline, read_peft, write_peft
from lorad.errors import AdapterRefused
from tests.conformance.expert_adapters import ADAPTERS, BATCH, MOE, adapter_of, merged_logprobs
from tests.conformance.reference import reference_logprobs, reference_model

WHOLE = ["experts", "all", "rslora", "low-rank-experts", "high-rank-experts", "low-rank-rslora"]


def written(name: str, directory: Path) -> Path:
    directory.mkdir()
    write_peft(adapter_of(name), directory, str(MOE))
    return directory


def of_peft(directory: Path) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a property that transformers deprecates
        model = PeftModel.from_pretrained(reference_model(MOE), directory).eval()
    found: np.ndarray = reference_logprobs(model, BATCH).detach().numpy()
    return found


@pytest.mark.parametrize("name", ADAPTERS)
def test_ranks_of_experts_are_read_back(name: str, tmp_path: Path) -> None:
    adapter = adapter_of(name)
    again = read_peft(written(name, tmp_path / "adapter"))
    assert again.config == adapter.config and again.digest() == adapter.digest()


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
