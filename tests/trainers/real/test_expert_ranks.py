"""Expert-parallel ranks of Megatron train one adapter: each holds its experts, all export the whole."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.trainer_experts import write_mixture
from tests.trainers.real.experts_rank import KINDS
from tests.trainers.real.start import MEGATRON_CPU

# CI tries the rules of adapters on experts over these ranks: test_conformance
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("experts_rank.py")
WORLDS = (1, 2)
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(megatron_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Facts]]:
    """What each rank found, by the number of expert-parallel ranks."""
    directory = tmp_path_factory.mktemp("experts")
    (directory / "model").mkdir()
    write_mixture(directory / "model")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{MEGATRON_CPU}"}
    places = [(world, rank) for world in WORLDS for rank in range(world)]
    running = [
        subprocess.Popen(
            [megatron_python, str(SCRIPT), str(rank), str(world), str(directory)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for world, rank in places
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=1800)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(said)
    told = {place: json.loads((directory / f"{place[0]}-{place[1]}.json").read_text()) for place in places}
    return {world: [told[world, rank] for rank in range(world)] for world in WORLDS}


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_exports_what_is_trained(ranks: dict[int, list[Facts]], kind: str) -> None:
    (alone,) = ranks[1]
    trained = alone[kind]["trained"]
    assert any(".experts.3." in name for name in trained)
    for rank in (alone, *ranks[2]):
        found = rank[kind]
        assert found["trained"] == found["exported"] == found["moved"] == trained
    assert len({rank[kind]["digest"] for rank in ranks[2]}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_as_one_does(ranks: dict[int, list[Facts]], kind: str) -> None:
    norms = [rank[kind]["norm"] for world in WORLDS for rank in ranks[world]]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)


def test_each_rank_holds_its_experts_alone(ranks: dict[int, list[Facts]]) -> None:
    whole = ranks[1][0]["one expert"]["here"]
    assert [rank["one expert"]["here"] for rank in ranks[2]] == [0, whole] and whole > 0
