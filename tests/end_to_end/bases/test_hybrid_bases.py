"""Runs on a Qwen3.5, which fsdp trains and the engine over transformers samples from: no server is there."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

from tests.kit.world import World, world
from tests.models.bases import write_spoken_base
from tests.models.on_peft import logprobs

pytestmark = pytest.mark.system

SPEC = """
model: {path: base}
lora: {rank: 8, alpha: 16}
algorithm: {group_size: 8}
reward: {name: regex, pattern: "^[0-9]"}
data: {train: sort, eval: sort, prompts_per_step: 4}
trainer: {backend: fsdp, lr: 1.0e-2, steps: 8}
rollout: {backend: transformers, max_new_tokens: 2}
eval: {every: 8, problems: 32}
checkpoint: {every: 2}
"""


@pytest.fixture(scope="module")
def calm() -> Iterator[tuple[World, dict[str, Any]]]:
    """A world with a run that nothing disturbed, and its facts."""
    with world() as made:
        write_spoken_base(made.root / "base", "qwen3_5")
        made.run("calm", text=SPEC)
        yield made, made.facts("calm")


def test_qwen3_5_learns_attested_without_a_server(calm: tuple[World, dict[str, Any]]) -> None:
    made, facts = calm
    versions = made.client.adapters("calm")
    assert [version.attested for version in versions] == ["passed"] * 9
    (_, before), (_, after) = facts["evals"]
    assert before < 0.2 < 0.6 < after


@pytest.mark.long  # test_fused_and_builtin.py kills a pool of this base; CI kills drivers of others
@pytest.mark.parametrize("victim", ["driver", "pool"])
def test_killed_and_resumed_equals_undisturbed(calm: tuple[World, dict[str, Any]], victim: str) -> None:
    made, expected = calm
    name = f"killed-{victim}"
    made.lorad("run", made.spec(SPEC), "--name", name, "--detach")
    made.reached(name, 3)
    os.kill(made.pid(name, victim), signal.SIGKILL)
    assert made.over(name).reason == "lost"
    made.lorad("resume", name, "--wait")
    assert made.facts(name) == expected
    assert [attempt.resumed_from is None for attempt in made.client.show(name).attempts] == [True, False]


@pytest.mark.parametrize(
    ("names", "kind"), [("file", Qwen3_5ForConditionalGeneration), ("class", Qwen3_5ForCausalLM)]
)
def test_peft_computes_what_trainer_and_engine_did(
    calm: tuple[World, dict[str, Any]], names: str, kind: Any
) -> None:
    """The names of the file are those of the class of config.json, not of that of the language model."""
    made, _ = calm
    exported, base = made.root / f"exported-{names}", made.root / "base"
    made.lorad("export", "calm@7", exported, "--names", names)
    how = "AutoPeftModelForCausalLM" if names == "class" else ".architectures[0]"
    assert how in (exported / "README.md").read_text()
    model = PeftModel.from_pretrained(kind.from_pretrained(base).eval(), exported)
    tokenizer = AutoTokenizer.from_pretrained(base)
    steps = made.client.steps("calm")
    assert max(step.metrics["logprob_difference_max"] or 0.0 for step in steps) < 1e-4
    for sample in made.client.samples("calm", step=8)[::4]:
        prompt = tokenizer(sample.prompt)["input_ids"]
        assert sample.version == "calm@7"
        assert np.abs(logprobs(model, prompt, sample.tokens) - sample.logprobs).max() < 1e-4


def test_peft_refuses_names_of_another_class(calm: tuple[World, dict[str, Any]]) -> None:
    made, _ = calm
    made.lorad("export", "calm@7", made.root / "file")
    alone = Qwen3_5ForCausalLM.from_pretrained(made.root / "base")
    with pytest.raises(ValueError, match="not found in the base model"):
        PeftModel.from_pretrained(alone, made.root / "file")


@pytest.mark.parametrize("names", ["file", "class"])
def test_exported_version_begins_another_run(calm: tuple[World, dict[str, Any]], names: str) -> None:
    made, _ = calm
    exported, heir = made.root / f"begin-{names}", f"heir-{names}"
    made.lorad("export", "calm@8", exported, "--names", names)
    made.run(heir, f"lora.adapter_path={exported}", "trainer.steps=1", "eval.every=0", text=SPEC)
    first, last = made.client.adapters(heir)[0], made.client.adapters("calm")[-1]
    assert first.attested == "passed" and first.sha256 == last.sha256


def test_merging_takes_no_names_of_linears() -> None:
    with world() as made:
        told = made.lorad("export", "calm@1", made.root / "merged", "--merge", "--names", "class", expect=2)
    assert "--names class is not for --merge" in told.stderr
