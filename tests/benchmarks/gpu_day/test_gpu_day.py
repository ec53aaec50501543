"""`make gpu-day` on a CPU: what it says of stages that break or hang. All of it: test_bare_machine.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu_day.model import write_model
from benchmarks.gpu_day.sizes import GIB, SIZES, pick
from benchmarks.gpu_day.stage import Place, read_figures
from benchmarks.gpu_day.stages import STAGES, Outcome, Stage, run_stage
from benchmarks.gpu_day.targets import judge
from benchmarks.gpu_day.torch_place import opened, work_of
from benchmarks.gpu_day.train import little_memory, measure
from lorad.daemon.gpu.devices import Device
from tests.kit.world import REPOSITORY

pytestmark = pytest.mark.system

LEAVES_ONE = """
import subprocess, sys, time
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(left.pid, flush=True)
time.sleep(600)
"""


def day(out: Path, *options: str, expect: int, **seconds: float) -> dict[str, Any]:
    """Run the command at its smallest size on the CPU, with limits that a busy machine keeps unless they are
    given; returns its report.
    """
    limits = {stage.name: 500.0 for stage in STAGES} | seconds
    options = *options, "--seconds", ",".join(f"{name}={limit}" for name, limit in limits.items())
    command = [sys.executable, "-m", "benchmarks.gpu_day.day", "--size", "micro", "--out", str(out)]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *options], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == expect, done.stderr
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found


def states(report: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["state"] for stage in report["stages"]}


def test_broken_stage_is_reported_beside_others(tmp_path: Path) -> None:
    report = day(tmp_path, "--stages", "rollout,facts", expect=1)  # no stage has written a model
    assert states(report) == {"facts": "passed", "rollout": "failed"} and not report["passed"]
    (broken,) = (stage for stage in report["stages"] if stage["state"] == "failed")
    assert "it exited with 1" in broken["error"] and "config.json" in broken["error"]
    assert broken["figures"]["bandwidth_gb_s"] > 0  # what it found before
    text = (tmp_path / "report.md").read_text()
    assert "**Failed: rollout.**" in text and broken["error"].splitlines()[-1] in text


async def test_halved_micro_batch_has_no_speed(tmp_path: Path) -> None:
    """The trainer goes on with smaller ones, whose speed would be told as that of the large one."""
    place = Place(SIZES["micro"], "cpu", tmp_path, tmp_path / "figures")
    write_model(place.dense, "Qwen3", place.size.model, place.device)
    async with opened(place, place.dense) as held:
        work = work_of(place, held.base.config.vocab_size, 2)
        with little_memory(place, held.trainer, None, 128):
            await measure(place, held, (256, False), work, 1.0)
    figures = read_figures(place.figures)
    assert figures.pop("dense.load_s") > 0
    assert figures == {"tokens_256.out_of_memory": "its micro-batches were halved to 128 tokens"}


def test_stage_over_its_time_is_killed(tmp_path: Path) -> None:
    report = day(tmp_path, "--stages", "facts,model", expect=1, facts=0.01)
    assert states(report) == {"facts": "over its time", "model": "passed"}
    assert "killed after 0.01 s" in (tmp_path / "report.md").read_text()


def test_nothing_of_a_killed_stage_stays(tmp_path: Path) -> None:
    outcome = Outcome(Stage("hangs", 5, "", ("-c", LEAVES_ONE)))
    run_stage(outcome, [], tmp_path, left=600)
    assert outcome.state == "over its time"
    pid = int(outcome.error.splitlines()[-1])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_without_time_nothing_is_begun(tmp_path: Path) -> None:
    outcome = Outcome(STAGES[0])
    run_stage(outcome, [], tmp_path, left=0.5)
    assert outcome.state == "no time left" and outcome.has_failed and not [*tmp_path.iterdir()]


def test_limits_add_up_to_ten_minutes() -> None:
    assert sum(stage.seconds for stage in STAGES) <= 585


@pytest.mark.parametrize(
    ("name", "memory", "room", "size"),
    [
        ("cuda:0", 141, 64, "8b"),
        ("cuda:0", 141, 12, "1b"),
        ("cuda:0", 24, 64, "1b"),
        ("cpu", 512, 9, "micro"),
    ],
)
def test_size_follows_the_device(name: str, memory: int, room: int, size: str) -> None:
    assert pick(Device(name, "", memory * GIB), room * GIB).name == size


def test_targets_are_judged_by_figures() -> None:
    found = {target.target.figure: target.is_reached for target in judge({"publish": {"in_process_s": 1.5}})}
    assert found.pop("publish:in_process_s") is False and set(found.values()) == {None}
