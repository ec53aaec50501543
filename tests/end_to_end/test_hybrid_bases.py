"""Runs on hybrid bases, which fsdp trains and the engine over transformers samples from."""

import shutil
from pathlib import Path

import pytest

import lorad.models.base
from tests.kit.world import world
from tests.models.bases import write_base

pytestmark = pytest.mark.system

SPEC = """
model: {path: BASE}
algorithm: {group_size: 8}
reward: {name: regex, pattern: "[A-M]"}
data: {train: sort, prompts_per_step: 2}
trainer: {backend: fsdp, lr: 2.0e-3, steps: 2}
rollout: {backend: transformers, max_new_tokens: 8}
eval: {every: 0}
checkpoint: {every: 1}
"""


def test_qwen3_5_learns_attested_without_a_server(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_base(base, "qwen3_5")
    for file in Path(lorad.models.base.__file__).with_name("tiny").glob("*tokenizer*"):
        shutil.copy(file, base / file.name)
    with world() as it:
        it.run("hybrid", text=SPEC.replace("BASE", str(base)))
        versions = it.client.adapters("hybrid")
        assert [version.attested for version in versions] == ["passed"] * 3
