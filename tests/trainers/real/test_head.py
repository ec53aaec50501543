"""Logits of a sharded trainer exist for a chunk of tokens: results are those of one chunk, memory is not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.reference import write_random_model
from tests.kit.warm.ranks import MEGATRON_CPU, interpreter

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("head_rank.py")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "tie_word_embeddings": False}
WHOLE, CHUNKS = "1000000", ("64", "7", "1")
FSDP = [("fsdp", 1, "float32"), ("fsdp", 2, "float32"), ("fsdp", 2, "bfloat16")]
MEGATRON = [("megatron", 1, "float32"), ("megatron", 2, "float32"), ("megatron", 2, "bfloat16")]
IN_CI = (FSDP[1], MEGATRON[1])
EACH = [
    pytest.param(case, id="-".join(map(str, case)), marks=[] if case in IN_CI else pytest.mark.long)
    for case in [*FSDP, *MEGATRON]
]
ROUNDING = {"float32": 2e-6, "bfloat16": 8e-3}
"""A product of other shapes rounds otherwise; in bfloat16 sums of a row keep 8 bits."""

Case = tuple[str, int, str]


def told(directory: Path, case: Case, python: str) -> list[dict[str, Any]]:
    """What each rank found."""
    backend, world, dtype = case
    write_random_model(directory / "model", vocab_size=3001, **SIZES)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if backend == "megatron":
        environment["PYTHONPATH"] += f":{MEGATRON_CPU}"
    ranks = [
        subprocess.Popen(
            [interpreter(python), str(SCRIPT), str(rank), str(world), str(directory), backend, dtype],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=1800)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module", params=EACH)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def ranks(case: Case, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    python = request.getfixturevalue("megatron_python") if case[0] == "megatron" else sys.executable
    return told(tmp_path_factory.mktemp("head"), case, python)


@pytest.mark.parametrize("loss", ["token", "sequence", "head"])
@pytest.mark.parametrize("what", ["grads", "logprobs", "stats"])
def test_chunks_change_nothing(ranks: Any, case: Case, loss: str, what: str) -> None:
    far = {size: max(rank[loss][size][what] for rank in ranks) for size in CHUNKS}
    assert max(far.values()) < ROUNDING[case[2]] * (100 if what == "stats" else 1), far


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_logits_are_never_whole(ranks: Any, loss: str) -> None:
    for rank in ranks:
        assert rank["logits"] <= rank[loss][WHOLE]["widest"] < 1.5 * rank["logits"]  # of this rank's words
        assert all(rank[loss][size]["widest"] < rank["logits"] for size in CHUNKS)


def test_weights_are_gathered_once(ranks: Any, case: Case) -> None:
    if case[0] == "megatron":
        pytest.skip("what Megatron gathers is the inside of an adapter, not its weights")
    for rank in ranks:
        assert len({rank["token"][size]["gathers"] for size in (WHOLE, *CHUNKS)}) == 1
