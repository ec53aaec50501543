"""Silent faults of servers in whole runs: what attestation says of them. See docs/lab/attestation-demo.md."""

import pytest
from safetensors.torch import load_file, save_file

from lorad.adapters.peft import write_peft
from lorad.adapters.targets import HEAD
from lorad.engines.remote.engine import RemoteEngine
from lorad.models.facts import read_facts
from tests.engines.real.hybrids.runs import start
from tests.engines.real.places import FITS, url_of
from tests.engines.real.test_whole_run import configure
from tests.kit.fakes.random_adapters import random_adapter
from tests.kit.world import SMALL, World, world
from tests.models.bases import write_spoken_base

FAULTS = "tests.engines.real.hybrids.faults"


def fails(made: World, words: str) -> None:
    """The first version that learned fails, and nobody samples from it."""
    shown = made.over("hybrid")
    assert shown.reason == "attestation_failed" and shown.step == 0, shown
    assert words in (shown.detail or "") and "nothing was sampled from it" in (shown.detail or "")
    assert made.client.steps("hybrid") == []
    assert [version.attested for version in made.client.adapters("hybrid")] == ["passed"]  # version 0


@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
def test_names_that_vllm_drops_are_noticed(kind: str, server: RemoteEngine) -> None:
    """vllm-project/vllm#49354: it loads keys of other names without a word, and serves the base."""
    with world() as made:
        configure(made, kind, engine=f"{FAULTS}:LongerNames")
        there = f"rollout.backend={kind}", url_of(server), *FITS
        made.lorad("run", made.spec(SMALL), *there, "--name", "hybrid", "--detach")
        fails(made, "the engine answers like the base")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
def test_names_of_a_hybrid_are_noticed(kind: str) -> None:
    """That of a model that reads images, where vllm-project/vllm#49354 was met."""
    with world() as made:
        start(made, kind, "qwen3_5", engine=f"{FAULTS}:OtherNames")
        fails(made, "the engine answers like the base")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sglang"], indirect=True)
def test_one_linear_left_out_is_noticed(kind: str) -> None:
    with world() as made:
        start(made, kind, "gemma3_text", engine=f"{FAULTS}:DropsOne")
        fails(made, "rel")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
def test_what_changes_no_text_is_mute(kind: str) -> None:
    """With a head of zeros no adapter changes an answer: one that is dropped passes, and says that it changes
    nothing.
    """
    with world() as made:
        base = made.root / "qwen3_5"
        write_spoken_base(base, "qwen3_5")
        tensors = load_file(base / "model.safetensors")
        tensors["lm_head.weight"].zero_()
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
        linears = {name: shape for name, shape in read_facts(base).linears.items() if name != HEAD}
        (made.root / "adapter").mkdir()
        write_peft(random_adapter(linears, 1, rank=16), made.root / "adapter", str(base))
        begin = f"lora.adapter_path={made.root / 'adapter'}"
        start(made, kind, "qwen3_5", begin, engine=f"{FAULTS}:OtherNames")
        made.completed("hybrid")
        for version in made.client.adapters("hybrid"):
            assert version.attested == "passed" and "it changes nothing yet" in version.attestation
