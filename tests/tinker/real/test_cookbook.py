"""Recipes of tinker-cookbook, unmodified and without the internet, against a door: they run and learn.
`make tinker ARGS='-m long -k cookbook'` with LORAD_COOKBOOK_PYTHON, where tinker-cookbook is installed.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from tests.tinker.real.offline import NAME, make
from tests.tinker.real.test_client import KEY, a_door

PYTHON = os.environ.get("LORAD_COOKBOOK_PYTHON", "")
RL = ("loss_fn=importance_sampling", "learning_rate=3e-3", "max_tokens=16", "lora_rank=8")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="no interpreter with tinker-cookbook is named"),
]


class Folder:
    """The offline folder, and a door whose base is the one in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def metrics(self, recipe: str, *settings: str) -> list[dict[str, float]]:
        """Run a recipe; what it logged of each step."""
        log = self.root / "logs" / "-".join([recipe, *settings]).replace("/", "-")[:200]
        argv = [PYTHON, "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={NAME}", f"log_path={log}"]
        environment = os.environ | {
            "TINKER_API_KEY": KEY,
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(self.root / "hf"),
        }
        done = subprocess.run(
            [*argv, *settings], env=environment, cwd=self.root, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr[-6000:]
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    root = tmp_path_factory.mktemp("offline")
    base = make(root)
    with a_door(bases={NAME: base}):
        yield Folder(root)


def rises(values: list[float], by: float) -> bool:
    """Whether the last quarter is that much better than the first."""
    part = len(values) // 4
    print([round(value, 3) for value in values])
    return fmean(values[-part:]) > fmean(values[:part]) + by


def test_sl_loop_learns(folder: Folder) -> None:
    steps = folder.metrics("sl_loop", "batch_size=32", "learning_rate=3e-3", "lora_rank=8", "save_every=0")
    assert rises([-step["train_mean_nll"] for step in steps], 0.5)


def test_rl_loop_learns(folder: Folder) -> None:
    steps = folder.metrics("rl_loop", *RL, "batch_size=16", "group_size=8", "save_every=0")
    assert rises([step["reward/total"] for step in steps], 0.1)


@pytest.mark.parametrize("off_policy", [(), ("max_steps_off_policy=1",)], ids=["on-policy", "one-step-off"])
def test_math_rl_learns(folder: Folder, off_policy: tuple[str, ...]) -> None:
    sizes = "env=gsm8k", "group_size=8", "groups_per_batch=16", "max_steps=20", "eval_every=0"
    steps = folder.metrics("math_rl.train", *RL, *sizes, *off_policy)
    assert rises([step["env/all/reward/total"] for step in steps], 0.1)
    if not off_policy:
        assert max(abs(step["optim/kl_sample_train_v1"]) for step in steps) < 1e-4


def test_dpo_learns(folder: Folder) -> None:
    steps = folder.metrics("preference.dpo.train", "batch_size=32", "learning_rate=1e-3")
    assert rises([-step["dpo_loss"] for step in steps], 0.05)
