"""Runs on hybrid bases: fsdp with the engine over transformers, and the builtin backends."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import Qwen3_5ForConditionalGeneration

import lorad.models.base
from lorad.rl.tokenizer import Tokenizer
from tests.kit.world import World, world
from tests.models.bases import write_hybrid, write_spoken_base

pytestmark = pytest.mark.system

SPEC = """
model: {path: BASE}
algorithm: {group_size: 8}
reward: {name: regex, pattern: "[A-M]"}
data: {train: sort, prompts_per_step: 2}
trainer: {backend: fsdp, lr: 2.0e-3, steps: 4}
rollout: {backend: transformers, max_new_tokens: 4}
eval: {every: 0}
checkpoint: {every: 1}
"""
STEPS = 10


def with_tokenizer(base: Path) -> None:
    for file in Path(lorad.models.base.__file__).with_name("tiny").glob("*tokenizer*"):
        shutil.copy(file, base / file.name)


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[World, str]]:
    """A run on a Qwen3.5 whose trainer and engine have one base, and the text of its spec.

    MKL rounds by where memory lies, on some CPUs, unless it is told not to.
    """
    with pytest.MonkeyPatch.context() as patch, world() as it:
        patch.setenv("MKL_CBWR", "COMPATIBLE")
        base = it.root / "base"
        write_spoken_base(base, "qwen3_5")
        text = SPEC.replace("BASE", str(base))
        it.run("fused", text=text)
        yield it, text


def test_one_base_serves_trainer_and_engine(made: tuple[World, str]) -> None:
    it, _ = made
    assert [pool.mode for pool in it.client.pools()] == ["fused"]
    assert [version.attested for version in it.client.adapters("fused")] == ["passed"] * 5


def test_one_base_gives_the_numbers_of_two(made: tuple[World, str]) -> None:
    it, text = made
    it.run("apart", "pool.mode=resident", text=text)
    assert it.facts("apart") == it.facts("fused")


def test_a_killed_fused_pool_loses_no_batch(made: tuple[World, str]) -> None:
    it, text = made
    it.lorad("run", it.spec(text), "--name", "killed", "--detach")
    it.reached("killed", 1)
    os.kill(it.pid("killed", "pool"), signal.SIGKILL)
    assert it.over("killed").reason == "lost"
    it.lorad("resume", "killed", "--wait")
    assert it.facts("killed") == it.facts("fused")


def test_builtin_qwen3_5_learns_through_a_kill(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_hybrid(base)
    with_tokenizer(base)
    text = SPEC.replace("BASE", str(base)).replace("fsdp", "builtin").replace("transformers", "builtin")
    text = text.replace("steps: 4", f"steps: {STEPS}").replace("_step: 2", "_step: 4")
    text = text.replace("[A-M]", "[A-D]").replace("2.0e-3", "3.0e-2")
    with world() as it:
        it.run("calm", text=text)
        rewards = [float(step.metrics["reward"] or 0) for step in it.client.steps("calm")]
        assert sum(rewards[-3:]) > sum(rewards[:3]) + 1
        assert {version.attested for version in it.client.adapters("calm")} == {"passed"}
        it.lorad("run", it.spec(text), "--name", "struck", "--detach")
        it.strike("struck", "pool", 3)
        assert it.over("struck").reason == "lost"
        it.lorad("resume", "struck", "--wait")
        assert it.facts("struck") == it.facts("calm")
        assert exported(it, base) < 2e-5


def exported(it: World, base: Path) -> float:
    """Return by how much the log-probabilities that the engine told of the last samples differ from those of
    transformers with the exported adapter that made them.
    """
    samples = it.client.samples("calm", step=STEPS)
    (version,) = {sample.version for sample in samples}
    it.lorad("export", version, it.root / "adapter")
    model = Qwen3_5ForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, str(it.root / "adapter")).eval()
    tokenizer = Tokenizer(base)
    worst = 0.0
    for sample in samples:
        asked = tokenizer.encode(sample.prompt)
        with torch.no_grad():
            scores = adapted(torch.tensor([[*asked, *sample.tokens]])).logits[0, len(asked) - 1 : -1]
        likely = scores.log_softmax(-1).gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
        worst = max(worst, float((likely - torch.tensor(sample.logprobs)).abs().max()))
    return worst
