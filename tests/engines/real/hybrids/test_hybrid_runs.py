"""Runs on bases of late 2026 with real servers: layers with a state, and models that read images."""

import os
import signal

import numpy as np
import pytest
from peft import PeftModel
from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration

from tests.engines.real.hybrids.runs import start
from tests.kit.world import world
from tests.models.on_peft import logprobs

# sgl-project/sglang#31522
WITHOUT_GATES = "lora.exclude_modules=[in_proj_a, in_proj_b]"


@pytest.mark.parametrize(
    ("kind", "family", "lora"),
    [
        ("vllm", "qwen3_5", ()),
        pytest.param("sglang", "qwen3_5", (WITHOUT_GATES,), marks=pytest.mark.long),
        pytest.param("vllm", "mistral3", (), marks=pytest.mark.long),
    ],
    indirect=["kind"],
)
def test_a_run_on_a_server_ends_attested(kind: str, family: str, lora: tuple[str, ...]) -> None:
    with world() as made:
        start(made, kind, family, "attest.amplified_every=1", *lora)
        made.completed("hybrid")
        first, *others = made.client.adapters("hybrid")
        assert len(others) == 3 and {version.attested for version in (first, *others)} == {"passed"}
        assert all("amplified" in version.attestation for version in others)
        steps = made.client.steps("hybrid")
        assert max(step.metrics["logprob_difference_max"] or 0.0 for step in steps) < 1e-4


LEARNS = (
    "algorithm.group_size=8", "reward.pattern=^[0-9]", "data.prompts_per_step=8", "data.eval=sort",
    "trainer.lr=1.0e-2", "trainer.steps=10", "rollout.max_new_tokens=4", "eval.every=10", "eval.problems=64",
    "checkpoint.every=2",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
def test_a_hybrid_learns_and_outlives_its_pool(kind: str) -> None:
    with world() as made:
        base = start(made, kind, "qwen3_5", *LEARNS)
        made.reached("hybrid", 3)
        os.kill(made.pid("hybrid", "pool"), signal.SIGKILL)
        assert made.over("hybrid").reason == "lost"
        made.lorad("resume", "hybrid", "--wait")
        assert {version.attested for version in made.client.adapters("hybrid")} == {"passed"}
        before, after = (row.score or 0.0 for row in made.client.evals("hybrid"))
        assert before < 0.2 < 0.6 < after
        samples = made.client.samples("hybrid", step=10)[::8]
        made.lorad("export", samples[0].version, made.root / "exported")
        model = PeftModel.from_pretrained(
            Qwen3_5ForConditionalGeneration.from_pretrained(base).eval(), made.root / "exported"
        )
        tokenizer = AutoTokenizer.from_pretrained(base)
        for sample in samples:
            error = logprobs(model, tokenizer(sample.prompt)["input_ids"], sample.tokens) - sample.logprobs
            assert np.abs(error).max() < 1e-4
