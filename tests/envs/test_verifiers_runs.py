"""Runs whose environment is of verifiers, a stand-in of it in an interpreter that has nothing else."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lorad.errors import SpecError
from lorad.protocol.journal import read
from lorad.rl.doubts import refuse_contradictions
from lorad.spec.model import Spec, to_json
from lorad.spec.text import from_json, load_task
from tests.kit.pool_kit import TINY
from tests.kit.world import World, world

FAKES = Path(__file__).parent / "fake_verifiers"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
NAME = "verifiers:owner/classic-toy"
SPEC = """
model: {path: model}
env: {name: %s, python: venv/bin/python, turns: 2, start_timeout: 600}
algorithm: {group_size: 2}
data: {prompts_per_step: 4}
trainer: {lr: 2.0e-3, steps: 2}
rollout: {max_new_tokens: 8}
eval: {every: 2, problems: 2}
"""
CLASSIC = SPEC % f"'{NAME}'"
TASKSET = SPEC % "'verifiers:taskset-toy'"


@pytest.fixture(scope="module")
def home() -> Iterator[World]:
    """Has a model that speaks in chats, and an interpreter for each stand-in: `venv` and `venv-new`."""
    with world() as made:
        model = shutil.copytree(TINY, made.root / "model")
        (model / "chat_template.jinja").write_text(TEMPLATE)
        for name, kind in (("venv", "old"), ("venv-new", "new")):
            bare = made.root / name
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
            (packages,) = bare.glob("lib/python3*/site-packages")
            (packages / "fakes.pth").write_text(f"{FAKES / kind}\n")
        (made.root / "venv-new/bin/uv").touch(mode=0o755)
        yield made


def spec_of(*overrides: str) -> Spec:
    return load_task(f"env: {NAME}", overrides=overrides)


def test_an_environment_implies_its_rows() -> None:
    spec = spec_of("data.prompts_per_step=4")
    assert (spec.data.train, spec.deterministic) == (NAME, False)
    assert (spec.env.workers, spec.env.concurrency) == (1, 16)
    assert spec_of("deterministic=true", "env.concurrency=3").env.concurrency == 3
    assert from_json(to_json(spec)) == spec


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{{env: '{NAME}', data: {{train: sort}}}}", f"plays {NAME}, and not the rows of sort"),
        (f"{{env: '{NAME}', data: {{eval: rows.jsonl}}}}", "and not the rows of rows.jsonl"),
        (f"{{env: '{NAME}', eval: {{sets: {{a: {{data: sort}}}}}}}}", "eval.sets.a.data: env.name plays"),
        (f"{{data: {{train: '{NAME}'}}}}", f"env.name plays None, and not the rows of {NAME}"),
        (f"{{env: '{NAME}', data: {{streaming: true}}}}", "which alone are streamed"),
        (f"{{env: '{NAME}', reward: gsm8k}}", "gives the reward of an episode"),
        (f"{{env: {{name: '{NAME}', sandbox: bubblewrap}}}}", "env.sandbox: .* which a sandbox has none of"),
    ],
)
def test_what_contradicts_it_is_refused(text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        refuse_contradictions(load_task(text))


@pytest.mark.parametrize("name", ["../x", "a/b/c", "", "-x", "x@"])
def test_an_id_is_needed(name: str) -> None:
    with pytest.raises(SpecError, match="name is verifiers:ID, such as"):
        load_task(f"env: 'verifiers:{name}'")


@pytest.mark.system
def test_an_old_environment_is_trained(home: World) -> None:
    home.run("talks", "env.args={kind: talk}", "algorithm.group_size=4", text=CLASSIC)
    samples = [sample for step in (1, 2) for sample in home.client.samples("talks", step=step)]
    assert len(samples) == 32 and {sample.end for sample in samples} == {"turns", "done"}
    steps = home.client.steps("talks")
    assert len(steps) == 2 and all(0.0 < (step.metrics["env/num_turns"] or 0.0) <= 2.0 for step in steps)
    assert abs(steps[-1].metrics["logprob_difference"] or 0.0) < 1e-3
    assert [each.score for each in home.client.evals("talks")] == [0.0, 0.0]
    (attempt,) = (record for record, _ in read(home.home.run("talks").journal) if record.kind == "attempt")
    assert attempt.data["inputs"]["env.name"]["path"] == f"{NAME} (verifiers 0.3.1)"


@pytest.mark.system
def test_a_new_taskset_is_trained(home: World) -> None:
    home.run("tasks", "env.python=venv-new/bin/python", text=TASKSET)
    metrics = home.client.steps("tasks")[-1].metrics
    assert metrics["env/reward/right"] == metrics["reward"] == 0.0 and metrics["env/letters"] is not None


@pytest.mark.system
def test_a_killed_environment_costs_no_episode(home: World) -> None:
    waiting = home.root / "waiting"
    spec = home.spec(CLASSIC, "killed.yaml")
    args = f"env.args={{kind: first waits, waiting: {waiting}}}"
    home.lorad("run", spec, args, "eval.every=0", "--name", "killed", "--detach")
    home.until(waiting.is_symlink, "an episode waits")
    os.kill(int(waiting.readlink().name), signal.SIGKILL)
    assert home.over("killed").reason == "completed"
    samples = [sample for step in (1, 2) for sample in home.client.samples("killed", step=step)]
    assert len(samples) == 16 and {sample.error or "" for sample in samples} == {""}
    assert not any(
        "lorad.envs" in " ".join(p.info["cmdline"] or ())
        for p in psutil.process_iter(["cmdline", "cwd"])
        if p.info["cwd"] == str(home.root)
    )


@pytest.mark.system
@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["env.args={requires_group_rollouts: true}"], "has rewards of a whole group"),
        (["env.args={kind: talk, tool_defs: [add]}"], "does not know how this model writes calls of tools"),
        (["env.python=venv-new/bin/python"], "has no module classic_toy"),
        (["env.name=verifiers:nothing"], "has no module nothing"),
        (["model.path=builtin:tiny"], "env.format: "),
    ],
)
def test_a_check_refuses_what_cannot_be_played(home: World, overrides: list[str], problem: str) -> None:
    assert problem in home.lorad("check", home.spec(CLASSIC), *overrides, expect=2).stderr


@pytest.mark.system
@pytest.mark.long
def test_a_killed_run_is_resumed(home: World) -> None:
    waiting = home.root / "waiting for its driver"
    args = f"env.args={{kind: first waits, waiting: '{waiting}'}}"
    home.lorad("run", home.spec(CLASSIC, "lost.yaml"), args, "--name", "lost", "--detach")
    home.until(waiting.is_symlink, "an episode waits")
    os.kill(home.pid("lost", "driver"), signal.SIGKILL)
    assert home.over("lost").reason == "lost"
    home.lorad("resume", "lost", "--wait")
    assert [step.step for step in home.client.steps("lost")] == [1, 2]


@pytest.mark.system
def test_a_trial_plays_some_episodes(home: World) -> None:
    tried = home.json("try", home.spec(CLASSIC), "-n", 2)
    assert len(tried["samples"]) >= 2 and {sample["reward"] for sample in tried["samples"]} == {0.0}
