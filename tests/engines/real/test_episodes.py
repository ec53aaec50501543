"""Episodes of several turns through the real servers: what the model reads is what is trained on."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.engines.remote.engine import RemoteEngine
from lorad.records.runs import RunDetails
from lorad.records.samples import Sample
from tests.driver.episodes.test_door import AGENT, TEMPLATE
from tests.engines.real.places import FITS, TINY, url_of
from tests.engines.real.test_whole_run import configure
from tests.kit.world import World, world

SPEC = """
seed: 3
lora: {rank: 8, alpha: 16}
algorithm: {group_size: 4}
data: {train: lookup, prompts_per_step: 4}
env: {name: lookup, turns: 3}
trainer: {lr: 1.5e-3, steps: 2}
rollout: {max_new_tokens: 12}
eval: {every: 2, problems: 8}
checkpoint: {every: 2}
"""
FREE = """
import time
from pathlib import Path
from lorad.envs.protocol import Observation

class Waits:
    '''Three turns; the first of one row is answered once an episode of the other row is over.'''
    def __init__(self, over):
        self.heard, self.over = 0, Path(over)

    def reset(self, row, seed):
        self.first = row["prompt"] == "S:391="
        return Observation(row["prompt"])

    def step(self, turn):
        self.heard += 1
        while self.first and not self.over.exists():
            time.sleep(0.01)
        if self.heard < 3:
            return Observation("S:82=", 0.25, replaces=True)
        self.over.touch()
        return Observation(None, len(turn.text) / 100)

    def close(self):
        pass
"""
ONE_STEP = ("trainer.steps=1", "eval.every=0", "data.train=rows.jsonl", "deterministic=false")
KINDS = ("grows", "forgets", "branches", "streams")
RECIPE = Path(__file__).parents[3] / "examples" / "lookup.yaml"
DELAYED = """
import time

def slow(prompt, completion, answer):
    time.sleep(0.05)
    return float(completion.strip() == answer)
"""


def finished(made: World, name: str, kind: str, spec: str, *overrides: str) -> RunDetails:
    made.lorad("run", made.spec(spec), f"rollout.backend={kind}", *overrides, "--name", name, "--detach")
    return made.completed(name)


@pytest.fixture(scope="module")
def made(kind: str) -> Iterator[World]:
    """A world whose model has a chat template."""
    with world() as it:
        configure(it, kind)
        model = shutil.copytree(TINY, it.root / "model")
        (model / "chat_template.jinja").write_text(TEMPLATE)
        (it.root / "envs.py").write_text(FREE)
        (it.root / "agent.py").write_text(AGENT)
        yield it


def played(made: World, name: str, kind: str, server: RemoteEngine, *overrides: str) -> list[Sample]:
    """A run on the server of all tests, whose samples are looked at: what it says of them is what the trainer
    says.
    """
    there = (f"model.path={made.root / 'model'}", url_of(server), *FITS)
    finished(made, name, kind, SPEC, *there, *overrides)
    for step in made.client.steps(name):
        assert abs(step.metrics["logprob_difference"] or 0.0) < 0.02, step.metrics
    assert {version.attested for version in made.client.adapters(name)} == {"passed"}
    samples = [s for step in made.client.steps(name) for s in made.client.samples(name, step=step.step)]
    for sample in samples:
        assert not sample.error and len(sample.logprobs) == sum(turn.tokens for turn in sample.turns)
    return samples


# programs speak with both kinds in CI
@pytest.mark.parametrize("kind", ["sglang", pytest.param("vllm", marks=pytest.mark.long)], indirect=True)
def test_server_reads_what_the_trainer_trains_on(made: World, kind: str, server: RemoteEngine) -> None:
    samples = played(made, "looked", kind, server)
    assert {len(sample.turns) for sample in samples} >= {2, 3}
    assert "16 episodes of step 2 played again, 0 differ" in made.lorad("replay", "looked").stderr


@pytest.mark.long
def test_episodes_run_free_through_a_server(made: World, kind: str, server: RemoteEngine) -> None:
    """In lockstep nobody would reach a third turn while a first one waits for that."""
    rows = [json.dumps({"prompt": prompt, "answer": "-"}) for prompt in ("S:28=", "S:391=")]
    (made.root / "rows.jsonl").write_text("\n".join(rows))
    env = f"env={{name: 'envs.py:Waits', args: {{over: {made.root / 'over'}}}, turns: 3, workers: 9}}"
    samples = played(made, "free", kind, server, *ONE_STEP, env, "data.prompts_per_step=2")
    assert [(len(sample.turns), sample.end) for sample in samples] == [(3, "done")] * 8


@pytest.mark.parametrize("kind", [pytest.param("sglang", marks=pytest.mark.long), "vllm"], indirect=True)
def test_programs_speak_with_a_server(made: World, kind: str, server: RemoteEngine) -> None:
    rows = [json.dumps({"prompt": kind, "answer": "-", "kind": kind}) for kind in KINDS]
    (made.root / "rows.jsonl").write_text("\n".join(rows))
    env = "env={name: 'agent.py:run', turns: 4, workers: 4}"
    samples = played(made, "agents", kind, server, *ONE_STEP, env, "data.prompts_per_step=4")
    assert {sample.version for sample in samples} == {"agents@0"} and len(samples) == 16
    for sample in samples:
        assert sample.task is not None
        cut = sum(turn.finish == "length" for turn in sample.turns[:-1])
        match sample.task.row["kind"]:
            case "forgets":
                assert sample.rows == 2
            case "branches":
                assert sample.rows == 2 + (sample.turns[0].finish == "length")
            case _:
                assert sample.rows == 1 + cut


@pytest.mark.long
def test_samples_are_scored_while_others_are_sampled(kind: str) -> None:
    with world() as made:
        configure(made, kind)
        (made.root / "slow.py").write_text(DELAYED)
        spec = SPEC.replace("env: {name: lookup, turns: 3}\n", "").replace("lookup", "sort")
        finished(made, "scored", kind, spec, "reward=slow.py:slow", "eval.every=0")
        assert [step.metrics["failed_rewards"] for step in made.client.steps("scored")] == [0.0] * 2


@pytest.mark.long
def test_lookup_is_learnt_through_a_server(kind: str) -> None:
    with world() as made:
        configure(made, kind)
        shown = finished(made, "learns", kind, RECIPE.read_text())
        assert (shown.eval_last or 0.0) >= 0.9, shown
