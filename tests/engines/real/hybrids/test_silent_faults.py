"""Silent faults of servers in whole runs: what attestation says of them. See docs/attestation-demo.md."""

import pytest

from tests.engines.real.hybrids.runs import start
from tests.kit.world import World, world

FAULTS = "tests.engines.real.hybrids.faults"


def fails(made: World, words: str) -> None:
    """The first version that learned fails, and nobody samples from it."""
    shown = made.over("hybrid", seconds=420)
    assert shown.reason == "attestation_failed" and shown.step == 0, shown
    assert words in (shown.detail or "") and "nothing was sampled from it" in (shown.detail or "")
    assert made.client.steps("hybrid") == []
    assert [version.attested for version in made.client.adapters("hybrid")] == ["passed"]  # version 0


@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
def test_names_that_vllm_drops_are_noticed(kind: str) -> None:
    """vllm-project/vllm#49354: it loads keys of other names without a word, and serves the base."""
    with world() as made:
        start(made, kind, "qwen3_5", engine=f"{FAULTS}:OtherNames")
        fails(made, "the engine answers like the base")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sglang"], indirect=True)
def test_one_linear_left_out_is_noticed(kind: str) -> None:
    with world() as made:
        start(made, kind, "gemma3_text", engine=f"{FAULTS}:DropsOne")
        fails(made, "rel")
