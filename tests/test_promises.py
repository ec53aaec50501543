"""What the README promises, by the command line, in one small world: quick sisters of `make test-system`."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from lorad.adapters.peft import read_peft
from tests.kit.world import REPOSITORY, World, world

SPEC = """
seed: 3
lora: {rank: 4, alpha: 8, dropout: 0.1}
algorithm: {group_size: 4}
data: {train: sort, prompts_per_step: 2}
trainer: {lr: 2.0e-3, steps: 12, schedule: cosine, warmup_steps: 2}
rollout: {max_new_tokens: 8}
eval: {every: 6, problems: 8}
checkpoint: {every: 3}
"""
STEPS = 12


@pytest.fixture(scope="module")
def box() -> Iterator[World]:
    with world() as made:
        yield made


@pytest.fixture(scope="module")
def first(box: World) -> Any:
    """A run that nobody disturbs, as JSON."""
    return box.json("run", box.spec(SPEC), "--name", "first", "--wait")


def test_a_run_has_figures_and_attested_versions(box: World, first: Any) -> None:
    assert (first["state"], first["reason"], first["step"]) == ("ended", "completed", STEPS)
    assert 0 <= first["eval_first"] <= 1 and 0 <= first["eval_last"] <= 1
    versions = box.json("adapters", "first")
    assert [version["version"] for version in versions] == list(range(len(versions)))
    assert {version["attested"] for version in versions} == {"passed"}
    assert len({version["sha256"] for version in versions}) == len(versions) > STEPS // 2
    assert [checkpoint["step"] for checkpoint in box.json("checkpoints", "first")][-1] == STEPS


@pytest.mark.parametrize("victim", ["driver", "pool"])
def test_a_killed_run_resumes_bit_for_bit(box: World, first: Any, victim: str) -> None:
    name = f"killed-{victim}"
    box.lorad("run", box.spec(SPEC), "--name", name, "--detach")
    box.reached(name, 2)
    os.kill(box.pid(name, victim), signal.SIGKILL)
    assert box.over(name).reason == "lost"
    box.lorad("resume", name, "--wait")
    assert box.facts(name) == box.facts("first")


def test_the_curve_of_a_demo_has_its_interval(box: World, first: Any) -> None:
    command = [sys.executable, str(REPOSITORY / ".ci" / "curve")]
    done = subprocess.run(command, env=box.environment, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  step")]
    assert [int(row[1]) for row in rows] == [0, 6, 12]
    assert all(float(row[3]) <= float(row[2]) <= float(row[5]) for row in rows)
    assert rows[-1][2] == f"{first['eval_last']:.3f}"


def test_training_goes_on_without_its_daemon(box: World, first: Any) -> None:
    box.lorad("run", box.spec(SPEC), "--name", "orphan", "--detach")
    box.pid("orphan", "driver")
    os.kill(box.json("daemon", "status")["pid"], signal.SIGKILL)
    assert "The daemon has died: it is started again." in box.lorad("list").stderr
    assert box.completed("orphan").attempts[-1].attempt == 1
    assert box.facts("orphan") == box.facts("first")


def test_runs_on_one_base_are_as_alone(box: World, first: Any) -> None:
    for name in ("left", "right"):
        box.lorad("run", box.spec(SPEC), "--name", name, "--detach")
    assert {box.completed(name).pool for name in ("left", "right")} == {first["pool"]}
    assert box.facts("left") == box.facts("right") == box.facts("first")


def test_an_alias_answers_with_its_version(box: World, first: Any) -> None:
    for version in (0, first["version"]):
        box.lorad("swap", "bot", f"first@{version}")
        assert [(alias["alias"], alias["version"]) for alias in box.json("aliases")] == [("bot", version)]
        asked = ("S:5172=", "--temperature", "0")
        by_alias = box.json("generate", "bot", *asked)["completions"]
        assert by_alias == box.json("generate", f"first@{version}", *asked)["completions"]


def test_an_exported_version_is_whole(box: World, first: Any) -> None:
    box.lorad("export", f"first@{first['version']}", "adapter")
    tensors = read_peft(box.root / "adapter").tensors
    assert tensors and all(tensor.ndim == 2 for tensor in tensors.values())
    checks = box.lorad("verify", "first").stdout.splitlines()
    assert len(checks) > 4 and all(line.startswith("✓ ") for line in checks)


def test_a_wrong_spec_is_refused_by_key(box: World) -> None:
    spec = box.spec("model: {path: builtin:tiny}\nlora:\n  rnak: 8\n", "wrong.yaml")
    error = box.lorad("run", spec, expect=2).stderr
    assert "wrong.yaml:3: lora.rnak: unknown key" in error and "Did you mean lora.rank?" in error
