"""Samples end with the end token of their chat template, which generation_config.json does not name."""

import json
import shutil

import pytest

from lorad.models.directory import resolve
from lorad.records.requests import Sampling
from lorad.rl.tokenizer import Tokenizer
from tests.kit.world import world

pytestmark = pytest.mark.system
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
SPEC = """
model: {path: ./base}
lora: {rank: 4, alpha: 8}
algorithm: {group_size: 8}
data: {train: rows.jsonl, eval: rows.jsonl, prompts_per_step: 1}
reward: reward.py:score
trainer: {steps: 1}
rollout: {max_new_tokens: 100, temperature: 2.0}
eval: {every: 1}
"""
REWARD = """
def score(completion_ids, finish):
    inside = 1 in completion_ids[:-1]
    return 0.0 if inside else 1.0 if finish == "stop" and completion_ids[-1] == 1 else 0.5
"""


def test_samples_end_with_the_template() -> None:
    with world() as made:
        base = made.root / "base"
        shutil.copytree(resolve("builtin:tiny"), base)
        (base / "chat_template.jinja").write_text(TEMPLATE)
        (base / "tokenizer_config.json").unlink(missing_ok=True)
        (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
        assert Tokenizer(base).eos_ids == (0, 1)
        (made.root / "rows.jsonl").write_text('{"prompt": "S:21="}\n')
        (made.root / "reward.py").write_text(REWARD)
        spec = made.spec(SPEC)
        said = made.lorad("run", spec, "--name", "ends", "--wait")
        assert "its configuration does not name <eos>" in said.stderr
        rewards = [sample.reward for sample in made.client.samples("ends", step=1)]
        assert 0.0 not in rewards and 1.0 in rewards
        served = made.client.generate("ends", "S:21=", Sampling(n=8, max_new_tokens=100, temperature=2.0))
        tokens = [completion.tokens for completion in served.completions]
        assert all(1 not in some[:-1] for some in tokens) and any(1 in some for some in tokens)
