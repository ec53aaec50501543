"""What goes wrong in a run, seen from outside: it stops with its reason, and nothing is lost."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from lorad.models.directory import resolve
from tests.kit.leftovers import kill_leftovers
from tests.kit.world import REPOSITORY, SMALL, World, world

pytestmark = pytest.mark.system

REWARDS = """
import os, time

def forever(prompt, **_):
    while len(prompt) % 2:
        pass
    return 1.0

def sometimes(completion, answer, **_):
    if completion != answer:
        raise ValueError("no such answer")
    return 1.0

def length(completion, **_):
    return -len(completion)

calls = 0

def huge_once(completion, **_):
    global calls
    calls += 1
    return len(completion) * (1e29 if 16 < calls <= 32 else 1.0)

def huge(completion, **_):
    return len(completion) * 1e29

def flaky(completion, **_):
    global calls
    calls += 1
    assert calls <= 32 or not os.path.exists("broken"), "it is broken"
    return -len(completion)

def never(completion, **_):
    if completion.isdigit() or not completion:
        raise ValueError("not today")
    return 1.0
"""


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        (it.root / "rewards.py").write_text(REWARDS)
        yield it


def test_engine_that_serves_other_weights_stops_the_run() -> None:
    with world() as made:
        made.home.root.mkdir()
        made.home.config.write_text(
            "backends: {odd: {engine: 'tests.kit.fakes.faulty_engines:ServesPrevious', "
            f"pythonpath: '{REPOSITORY}'}}}}"
        )
        run = made.run("odd", "rollout.backend=odd", expect=1)
        assert (run.state, run.reason) == ("ended", "attestation_failed")
        last_good = made.client.adapters("odd")[-1].version
        assert {s.version for s in made.client.steps("odd")} <= set(range(last_good + 1))
        assert run.step == last_good == 1  # the third load is the faulty one: version 2 never became current


def test_reward_that_never_returns_is_a_failed_sample(made: World) -> None:
    reward = "reward={name: 'rewards.py:forever', timeout: 0.2, max_failures: 1, workers: 1}"
    (made.root / "two.jsonl").write_text(
        '{"prompt": "S:421=", "answer": ""}\n{"prompt": "S:21=", "answer": ""}'
    )  # in this order: the first call of a process has more time
    data = ("data.train=two.jsonl", "data.shuffle=false", "data.prompts_per_step=1", "algorithm.group_size=2")
    run = made.run("forever", reward, "trainer.steps=2", "eval.every=0", *data)
    assert run.reason == "completed"
    rewards = [{s.reward for s in made.client.samples("forever", step=step)} for step in (1, 2)]
    assert rewards == [{1.0}, {None}]


def test_reward_that_raises_is_counted_and_shown(made: World) -> None:
    reward = "reward={name: 'rewards.py:sometimes', max_failures: 0.9}"
    overrides = (reward, "trainer.steps=1", "eval={every: 1, problems: 16}")
    told = made.lorad("run", made.spec(), *overrides, "--name", "sometimes", "--wait").stderr
    samples = made.client.samples("sometimes", step=1)
    errors = [s.error for s in samples if s.error]
    assert "no such answer" in errors[0] and {s.reward for s in samples} == {None, 1.0}
    metrics = made.client.steps("sometimes")[0].metrics
    assert metrics["failed_rewards"] == metrics["failed_rewards_total"] == len(errors)
    assert metrics["reward"] == 1.0
    evals = made.client.evals("sometimes")
    assert (
        all(e.score == (1.0 if e.failed < 16 else None) for e in evals) and max(e.failed for e in evals) > 0
    )
    shown = (told, made.lorad("list").stdout, made.lorad("show", "sometimes").stdout)
    assert all(f"{len(errors)} rewards failed" in text for text in shown)


def test_reward_failing_a_whole_step_ends_the_run(made: World) -> None:
    run = made.run("never", "reward=rewards.py:never", expect=1)
    assert run.reason == "failed" and "not today" in run.detail
    samples = made.json("samples", "never")
    assert len(samples) == 16 and all("not today" in s["error"] and s["reward"] is None for s in samples)
    assert "reward" not in made.client.steps("never")[0].metrics and run.version == 0


def test_resume_repeats_the_failed_step_after_mending(made: World) -> None:
    straight = made.run("straight", "reward=rewards.py:length", "checkpoint.every=50")
    broken = made.root / "broken"
    broken.write_text("S")
    made.spec(SMALL, "mended.yaml")
    reward = ("reward=rewards.py:flaky", "checkpoint.every=50", "rollout.max_staleness=0")
    made.lorad("run", "mended.yaml", *reward, "--name", "mended", "--wait", expect=1)
    assert made.client.show("mended").step == 3 and made.client.checkpoints("mended")[-1].step == 2
    broken.unlink()
    made.lorad("resume", "mended", "--wait")
    assert made.facts("mended") == made.facts("straight") and straight.reason == "completed"


def test_nonfinite_gradient_skips_its_step_and_warns(made: World) -> None:
    overrides = (
        "reward=rewards.py:huge_once",
        "algorithm.scale=one",
        "trainer.steps=3",
        "trainer.weight_decay=0.1",
    )
    told = made.lorad("run", made.spec(), *overrides, "--name", "once", "--wait").stderr
    metrics = [step.metrics for step in made.client.steps("once")]
    assert [m["skipped_updates"] for m in metrics] == [0, 1, 0] and [m["updates"] for m in metrics] == [
        1,
        0,
        1,
    ]
    assert "grad_norm" not in metrics[1] and "loss" not in metrics[1] and (metrics[1]["reward"] or 0) > 1e28
    assert [v.step for v in made.client.adapters("once")] == [0, 1, 3]
    shown = made.lorad("show", "once").stdout
    assert (
        "1 of 1 updates of step 2 were skipped" in shown
        and "1 updates skipped" in shown
        and "1 updates skipped" in told
    )


def test_several_skipped_steps_end_the_run(made: World) -> None:
    """A resume then takes other data."""
    overrides = (
        "reward=rewards.py:huge",
        "algorithm.scale=one",
        "trainer.max_skipped_steps=2",
        "checkpoint.every=50",
    )
    run = made.run("endless", *overrides, expect=1)
    assert (run.step, run.version, run.reason) == (2, 0, "failed")
    assert "not finite in 2 steps in a row" in run.detail and "resume endless" in run.detail
    made.lorad("resume", "endless", "--wait", expect=1)
    prompts = [{s.prompt_id for s in made.client.samples("endless", step=n)} for n in (1, 2, 3, 4)]
    assert made.client.show("endless").step == 4 and len(set.union(*prompts)) == 16
    assert made.lorad("verify", "endless").returncode == 0


def test_unwritable_checkpoints_end_the_run_but_keep_earlier(made: World) -> None:
    made.run("blocked", "trainer.steps=2")
    directory = Path(made.client.show("blocked").directory)
    kept = directory / "checkpoints"
    kept.rename(directory / "aside")
    kept.symlink_to("/proc/self/nowhere")  # whatever the mode and the user: nothing can be made in there
    error = made.lorad("resume", "blocked", "--steps", "4", "--wait", expect=1).stderr
    assert "checkpoint" in error
    kept.unlink()
    (directory / "aside").rename(kept)
    made.lorad("resume", "blocked", "--steps", "4", "--wait")
    assert made.client.show("blocked").reason == "completed"


def test_gsm8k_goes_through_the_whole_loop(made: World) -> None:
    rows = REPOSITORY.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
    source = str(rows) if rows.exists() else str(few_problems(made))
    overrides = (
        f"data={{train: '{source}', prompt_key: question, prompts_per_step: 4, max_prompt_tokens: 400}}",
    )
    run = made.run(
        "gsm8k", *overrides, "reward=gsm8k", "trainer.steps=2", "rollout.max_new_tokens=24", text=SMALL
    )
    assert run.reason == "completed" and run.step == 2
    sample = made.client.samples("gsm8k", step=2)[0]
    assert "####" in (sample.answer or "") and len(sample.prompt) > 40


def few_problems(made: World) -> Path:
    path = made.root / "problems.jsonl"
    line = (
        '{{"question": "Ann has {0} apples and buys {0} more. How many apples has she?", "answer": "#### '
        '{1}"}}\n'
    )
    path.write_text("".join(line.format(n, 2 * n) for n in range(2, 30)))
    return path


def test_resume_on_other_base_weights_is_refused(made: World) -> None:
    model = made.root / "model"
    shutil.copytree(resolve("builtin:tiny"), model)
    made.run("rebased", f"model.path={model}", "trainer.steps=2")
    pool = made.client.show("rebased").pool
    assert pool is not None
    made.client.stop_pool(pool)
    made.until(lambda: pool not in {p.pool for p in made.client.pools()}, "the pool is gone")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    error = made.lorad("resume", "rebased", "--steps", "3", "--wait", expect=1).stderr
    assert "not those that this run was trained on" in error
    made.json("fork", "rebased@2", "--name", "forked", "--steps", "1", "--wait", expect=1)
    assert "are not those that rebased@2 was trained on" in made.client.show("forked").detail


def test_rounded_base_stays_on_its_grid(made: World, tmp_path: Path) -> None:
    made.run("rounded", "model.quantize=nf4", "trainer.steps=2")
    assert {version["attested"] for version in made.json("adapters", "rounded")} == {"passed"}
    made.lorad("verify", "rounded")
    merge = made.lorad("export", "rounded@2", tmp_path / "model", "--merge", expect=2).stderr
    assert "trained on its base rounded to nf4" in merge and not list(tmp_path.iterdir())
    fork = ("fork", "rounded@2", "--name", "regridded", "--steps", "1", "--wait")
    made.json(*fork, "model.quantize=null", expect=1)
    assert "are not those that rounded@2 was trained on" in made.client.show("regridded").detail


def test_full_disk_keeps_the_last_good_checkpoint() -> None:
    with world() as made, small_disk(made, "7m") as disk:
        made.home.root.mkdir()
        made.home.config.write_text(f"storage: {disk}")
        run = made.run("full", "trainer.steps=60", expect=1)  # half a megabyte a step
        told = run.detail + made.lorad("logs", "full").stdout
        assert run.reason == "failed" and ("No space left" in told or "the disk is full" in told)
        good = made.client.checkpoints("full")[-1].step
        subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
        made.lorad("resume", "full", "--steps", str(good + 2), "--wait")
        assert made.client.show("full").step == good + 2


@contextmanager
def small_disk(made: World, size: str) -> Iterator[Path]:
    disk = made.root / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only a user who may mount can make a small disk")
    try:
        yield disk
    finally:
        kill_leftovers(made.home.root)
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_failing_run_changes_nothing_for_its_neighbour(made: World) -> None:
    made.run("calm", "trainer.steps=8", "seed=5")
    started = [("beside", "trainer.steps=8"), ("broken", "reward=rewards.py:never")]
    for name, override in started:
        made.lorad("run", made.spec(SMALL), override, "seed=5", "--name", name, "--detach")
    assert made.over("broken").reason == "failed" and made.over("beside").reason == "completed"
    assert made.client.show("beside").pool == made.client.show("broken").pool
    assert made.facts("beside") == made.facts("calm")
