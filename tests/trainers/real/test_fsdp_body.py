"""The FSDP body on one rank and on two, against transformers and PEFT in one piece."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, MixtralConfig

from tests.conformance.reference import VOCAB, write_random_model

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 47,
    "num_hidden_layers": 11,
    "num_attention_heads": 2,
    "head_dim": 16,
}
DROPS = {"attention_dropout": 0.5}  # which acts in training mode, where a base never is
ROUNDING = 5e-5
Facts = dict[str, Any]


def write_mixture_of_experts(directory: Path) -> None:
    """Its experts are stored one by one, and are one parameter in memory."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    config = MixtralConfig(**sizes, **heads, num_local_experts=4, initializer_range=0.2)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def write_scaled_logits(directory: Path) -> None:
    """What its output layer gives is divided afterwards, beside the layer itself."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    config = GraniteConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, **heads,
        logits_scaling=3.0, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Facts]]:
    """What each rank of a world found, by the world's size."""
    directory = tmp_path_factory.mktemp("fsdp")
    write_random_model(directory / "dense", **SMALL, **DROPS, tie_word_embeddings=False)
    write_mixture_of_experts(directory / "experts")
    write_scaled_logits(directory / "scaled")
    places = [(rank, world) for world in (1, 2) for rank in range(world)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainers.real.fsdp_rank", str(rank), str(world), str(directory)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, world in places
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=1800)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(said)
    told = {place: json.loads((directory / f"{place[1]}-{place[0]}.json").read_text()) for place in places}
    for place, output in zip(places, said, strict=True):
        told[place]["said"] = output
    return {world: [told[rank, world] for rank in range(world)] for world in (1, 2)}


@pytest.fixture(params=[1, 2])
def everyone(ranks: dict[int, list[Facts]], request: pytest.FixtureRequest) -> list[Facts]:
    return ranks[request.param]


@pytest.fixture(params=["dense", "experts", "scaled"])
def facts(everyone: list[Facts], request: pytest.FixtureRequest) -> list[Facts]:
    """The facts of one model, rank by rank."""
    return [rank[request.param] for rank in everyone]


def worst(facts: list[Facts], what: str) -> float:
    return float(max(rank[what] for rank in facts))


def test_the_base_computes_what_transformers_computes(facts: list[Facts]) -> None:
    assert worst(facts, "base") < ROUNDING


def test_sequences_of_a_row_are_independent(facts: list[Facts]) -> None:
    assert all(rank["packs"] for rank in facts)
    assert worst(facts, "packed") < ROUNDING


def test_ranks_share_the_base_among_them(facts: list[Facts]) -> None:
    counted, whole, _ = facts[0]["parameters"]
    assert counted == whole == sum(rank["parameters"][2] for rank in facts)
    assert (
        worst([{"held": rank["parameters"][2]} for rank in facts], "held") < 1.05 * whole / len(facts) + 500
    )


def test_a_zero_b_changes_nothing(facts: list[Facts]) -> None:
    assert worst(facts, "zero_b") == 0


def test_an_adapter_acts_as_in_peft(facts: list[Facts]) -> None:
    assert worst(facts, "logits") < ROUNDING


@pytest.mark.parametrize("how", ["summed", "one_works", "recomputed"])
def test_summed_gradients_equal_the_whole_batch(facts: list[Facts], how: str) -> None:
    assert worst(facts, how) < ROUNDING * max(1.0, facts[0]["greatest"])


def test_without_its_adapter_the_model_is_the_base(facts: list[Facts]) -> None:
    assert worst(facts, "off") == 0


def test_training_leaves_the_base_alone(facts: list[Facts]) -> None:
    assert all(rank["checksum"] for rank in facts)


def test_differently_shaped_adapter_can_take_over(facts: list[Facts]) -> None:
    assert facts[0]["names"][0] and facts[0]["names"][1] in (4, 7)  # of layer 1, not of layers 10 and 11
    assert worst(facts, "remounted") < ROUNDING
    assert worst(facts, "round_trip") == 0


def test_recomputation_repeats_the_adapters_dropout(facts: list[Facts]) -> None:
    assert worst(facts, "dropped") > 0.01 and worst(facts, "dropped_differs") > 0.01
    assert worst(facts, "dropped_recomputed") == 0


def test_unknown_module_is_refused_and_leaves_nothing(facts: list[Facts]) -> None:
    assert all(rank["unknown"].startswith("AdapterRefused") for rank in facts)
    assert worst(facts, "after_refusal") == 0


def test_moving_the_base_away_and_back_changes_nothing(facts: list[Facts]) -> None:
    assert worst(facts, "moved") == 0
    assert all(rank["moved_checksum"] for rank in facts)


def test_routers_are_no_targets(everyone: list[Facts]) -> None:
    targets = {name.rpartition(".")[2] for name in everyone[0]["experts"]["shapes"]}
    assert targets == {"q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3", "lm_head"}


def test_one_rank_reads_and_reports_fused_weights(everyone: list[Facts]) -> None:
    assert (
        "every rank reads its own rows" in everyone[0]["said"]
        and "rank 0 reads all of it" in everyone[0]["said"]
    )


def test_other_parallelism_and_unknown_arguments_are_refused(everyone: list[Facts]) -> None:
    assert "trainer.tp" in everyone[0]["tp"] and "SpecError" in everyone[0]["tp"]
    assert "colour" in everyone[0]["args"]
