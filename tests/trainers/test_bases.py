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
    (answers,) = _asked(tmp_path_factory.mktemp("bases"), 1, list(FAMILIES))
    return answers


@pytest.fixture(params=FAMILIES)
def facts(bodies: dict[str, _Facts], request: pytest.FixtureRequest) -> _Facts:
    return bodies[request.param]


def _asked(directory: Path, world: int, families: list[str]) -> list[dict[str, _Facts]]:
    """Return what each rank of a world says of some families."""
    for family in families:
        write_base(directory / family, family)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    program = [sys.executable, "-m", "tests.trainers.bases_rank"]
    running = [
        subprocess.Popen(
            [*program, str(rank), str(world), str(directory), *families], cwd=ROOT, env=environment
        )
        for rank in range(world)
    ]
    try:
        assert [process.wait(timeout=900) for process in running] == [0] * world
    finally:
        for process in running:
            process.kill()
    return [json.loads((directory / f"{world}-{rank}.json").read_text()) for rank in range(world)]


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


def test_no_kernel_reads_weights_past_an_adapter(facts: _Facts) -> None:
    assert facts["shortcuts"] == 0


def test_two_ranks_train_what_one_rank_does(tmp_path: Path) -> None:
    """Families whose class has other names than their file; each rank holds half of a base."""
    families = ["qwen3_5", "mistral3"]
    for answers in _asked(tmp_path, 2, families):
        for family in families:
            facts = answers[family]
            assert facts["linears"] and facts["parameters"] and facts["unchanged"]
            assert max(facts["base"], facts["adapted"], facts["gradients"]) < ROUNDING < 1 < facts["moves"]
