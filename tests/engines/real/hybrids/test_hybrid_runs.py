"""Runs on bases of late 2026 with real servers: layers with a state, and models that read images."""

import pytest

from tests.engines.real.hybrids.runs import start
from tests.kit.world import world

# sgl-project/sglang#31522
WITHOUT_GATES = "lora.exclude_modules=[in_proj_a, in_proj_b]"


@pytest.mark.parametrize(
    ("kind", "family", "lora"),
    [
        ("vllm", "qwen3_5", ()),
        pytest.param("sglang", "qwen3_5", (WITHOUT_GATES,), marks=pytest.mark.long),
        pytest.param("vllm", "mistral3", (), marks=pytest.mark.long),
    ],
    indirect=["kind"],
)
def test_a_run_on_a_server_ends_attested(kind: str, family: str, lora: tuple[str, ...]) -> None:
    with world() as made:
        start(made, kind, family, "attest.amplified_every=1", *lora)
        made.completed("hybrid")
        first, *others = made.client.adapters("hybrid")
        assert len(others) == 3 and {version.attested for version in (first, *others)} == {"passed"}
        assert all("amplified" in version.attestation for version in others)
