"""OpenPipe ART's backend for Tinker, unmodified, learns through the door."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.tinker.real.cookbook_folder import make
from tests.tinker.real.test_client import a_door, environment
from tests.tinker.real.test_cookbook import NAME, rise

PYTHON = os.environ.get("LORAD_ART_PYTHON", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="`make tinker-art` installs OpenPipe ART"),
]


def test_art_learns(tmp_path: Path) -> None:
    with a_door(bases={NAME: make(tmp_path)}):
        own = environment(HF_HOME=str(tmp_path / "hf"), LITELLM_LOCAL_MODEL_COST_MAP="True")
        argv = [PYTHON, str(Path(__file__).with_name("client_art.py")), NAME]
        done = subprocess.run(argv, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-6000:]
    rewards = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("reward ")]
    print(rewards)
    assert len(rewards) == 12 and rise(rewards) > 0.2
