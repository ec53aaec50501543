"""The FSDP body on tiny checkpoints of many families, against transformers and PEFT in one piece."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models.bases import FAMILIES, write_base

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
ROUNDING = 1e-4
_Facts = dict[str, Any]


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, _Facts]:
    """What one rank says of each family."""
    directory = tmp_path_factory.mktemp("bases")
    for family in FAMILIES:
        write_base(directory / family, family)
    command = [sys.executable, "-m", "tests.trainers.bases_rank", str(directory), *FAMILIES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=900)
    answers: dict[str, _Facts] = json.loads((directory / "found.json").read_text())
    return answers


@pytest.fixture(params=FAMILIES)
def facts(bodies: dict[str, _Facts], request: pytest.FixtureRequest) -> _Facts:
    return bodies[request.param]


def test_linears_are_named_as_in_the_file(facts: _Facts) -> None:
    assert facts["linears"]


def test_towers_are_not_held(facts: _Facts) -> None:
    assert facts["parameters"]


def test_the_base_computes_what_transformers_computes(facts: _Facts) -> None:
    assert facts["base"] < ROUNDING


def test_adapters_act_and_learn_as_in_peft(facts: _Facts) -> None:
    assert facts["adapted"] < ROUNDING < 1 < facts["moves"]
    assert facts["gradients"] < ROUNDING
    assert facts["unchanged"]
