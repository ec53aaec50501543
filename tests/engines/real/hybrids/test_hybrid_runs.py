"""Runs on bases whose layers remember in a state instead of keys and values, with real servers."""

import pytest

from tests.engines.real.hybrids.runs import start
from tests.kit.world import world


@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("mistral3", marks=pytest.mark.long)])
def test_a_run_ends_attested_on_vllm(kind: str, family: str) -> None:
    with world() as made:
        start(made, kind, family, "attest.amplified_every=1")
        made.completed("hybrid", seconds=420)
        assert [version.attested for version in made.client.adapters("hybrid")] == ["passed"] * 4
