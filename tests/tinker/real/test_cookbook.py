"""`make tinker-cookbook`: recipes of tinker-cookbook, unmodified and without the internet, learn through the
door. The commands are those of docs/tinker.md.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from tests.tinker.real.cookbook_folder import make
from tests.tinker.real.test_client import a_door, environment

PYTHON = os.environ.get("LORAD_COOKBOOK_PYTHON", "")
NAME = "Qwen/Qwen3.5-9B-Base"  # in the cookbook's table, with a plain format of chats
PAGE = (Path(__file__).parents[3] / "docs" / "tinker.md").read_text()

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="`make tinker-cookbook` installs the cookbook"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that recipes run in, while a door has its base."""
    root = tmp_path_factory.mktemp("cookbook")
    with a_door(bases={NAME: make(root)}):
        yield root


def steps_of(folder: Path, name: str) -> list[dict[str, float]]:
    """Run the page's command that logs to logs/NAME; what it logged of each step."""
    lines = PAGE.replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if line.endswith(f"log_path=logs/{name}")]
    python, *arguments = line.removeprefix("$ ").split()
    assert python == "python"
    argv, own = [PYTHON, *arguments], environment(HF_HOME=str(folder / "hf"))
    done = subprocess.run(argv, env=own, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-6000:]
    text = (folder / "logs" / name / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def logged(steps: list[dict[str, float]], key: str) -> list[float]:
    """What the steps that have the key logged under it; the last line is that of no step."""
    values = [float(f"{step[key]:.4g}") for step in steps if key in step]
    print(f"{key}: {values}")
    return values


def rise(values: list[float]) -> float:
    """How much the mean of the last three is above that of the first three."""
    return fmean(values[-3:]) - fmean(values[:3])


def test_sl_loop_learns(folder: Path) -> None:
    losses = logged(steps_of(folder, "sl"), "train_mean_nll")
    assert rise(losses) < -1
    assert losses[-1] < losses[0] / 4


def test_rl_loop_learns(folder: Path) -> None:
    assert rise(logged(steps_of(folder, "rl"), "reward/total")) > 0.2


@pytest.mark.parametrize("name", ["math", "math-off"])
def test_math_rl_learns(folder: Path, name: str) -> None:
    steps = steps_of(folder, name)
    assert rise(logged(steps, "env/all/reward/total")) > 0.2
    if name == "math":  # the sampler and the trainer agree about each token
        assert max(map(abs, logged(steps, "optim/kl_sample_train_v1"))) < 1e-4
    else:
        assert max(logged(steps, "async/staleness_max")) == 1


def test_verifiers_rl_learns(folder: Path) -> None:
    assert rise(logged(steps_of(folder, "verifiers"), "env/all/reward/total")) > 0.2


def test_dpo_learns(folder: Path) -> None:
    steps = steps_of(folder, "dpo")
    assert steps[0]["dpo_loss"] == pytest.approx(0.6931, abs=1e-3)  # the model is the reference
    assert rise(logged(steps, "chosen_reward")) > 0  # beta 0.1, times nats above the reference
    assert rise(logged(steps, "margin")) > 0.1
    assert logged(steps, "accuracy")[-1] > 0.9
