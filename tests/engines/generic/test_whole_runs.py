"""Runs on hybrid bases, which fsdp trains and the engine over transformers samples from."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import lorad.models.base
from tests.kit.world import World, world
from tests.models.bases import write_base

pytestmark = pytest.mark.system

SPEC = """
model: {path: BASE}
algorithm: {group_size: 8}
reward: {name: regex, pattern: "[A-M]"}
data: {train: sort, prompts_per_step: 2}
trainer: {backend: fsdp, lr: 2.0e-3, steps: 3}
rollout: {backend: transformers, max_new_tokens: 8}
eval: {every: 0}
checkpoint: {every: 1}
"""


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[World, str]]:
    """A run on a Qwen3.5 whose trainer and engine have one base, and the text of its spec."""
    with world() as it:
        base = it.root / "base"
        write_base(base, "qwen3_5")
        for file in Path(lorad.models.base.__file__).with_name("tiny").glob("*tokenizer*"):
            shutil.copy(file, base / file.name)
        text = SPEC.replace("BASE", str(base))
        it.run("fused", text=text)
        yield it, text


def test_qwen3_5_learns_attested_without_a_server(made: tuple[World, str]) -> None:
    it, _ = made
    assert [pool.mode for pool in it.client.pools()] == ["fused"]
    assert [version.attested for version in it.client.adapters("fused")] == ["passed"] * 4


def test_one_base_gives_the_numbers_of_two(made: tuple[World, str]) -> None:
    it, text = made
    it.run("apart", "pool.mode=resident", text=text)
    assert it.facts("apart") == it.facts("fused")


def test_a_killed_fused_pool_loses_no_batch(made: tuple[World, str]) -> None:
    it, text = made
    it.lorad("run", it.spec(text), "trainer.steps=8", "--name", "killed", "--detach")
    it.reached("killed", 1)
    os.kill(it.pid("killed", "pool"), signal.SIGKILL)
    assert it.over("killed").reason == "lost"
    it.lorad("resume", "killed", "--wait")
    it.run("undisturbed", "trainer.steps=8", text=text)
    assert it.facts("killed") == it.facts("undisturbed")
