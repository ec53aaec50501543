"""Ranks compute as their engine does: with the experts that it sent tokens to, and its rounded numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lorad.adapters.adapter import AdapterConfig
from lorad.models.compute import Compute
from lorad.models.directory import BUILTIN
from lorad.models.loading import load_base
from lorad.protocol.batch import Batch
from lorad.protocol.pool_setup import Quantize
from lorad.trainers.base import Policy, SlotSpec, Trainer
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.kit.world import REPOSITORY, world
from tests.trainers.real.start import started

MOE_DEMO = REPOSITORY / "examples" / "demo-moe.yaml"
FEW = ("trainer.steps=3", "eval.every=0", "attest.amplified_every=1")
SLOT = SlotSpec(AdapterConfig(2, 4.0, ("model.layers.0.self_attn.q_proj",)))
TOKENS = np.random.default_rng(0).integers(0, 55, 40).astype(np.int32)
BATCH = Batch.of([(TOKENS[:4], [TOKENS[4:20], TOKENS[20:]])])


# CI tries the rules of replayed routes on ranks: test_conformance
@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_send_tokens_where_the_engine_did(dtype: str) -> None:
    with world() as made:
        how = ("trainer.backend=fsdp", "trainer.dp=2", f"model.dtype={dtype}", "rollout.routes=record")
        made.lorad("run", MOE_DEMO, *how, *FEW, "--name", "moe", "--detach")
        made.completed("moe")
        metrics = [step.metrics for step in made.client.steps("moe")]
        assert len(metrics) == 3 and {m["routes_unknown"] for m in metrics} == {0.0}
        differ = max(m["routes_differ"] or 0.0 for m in metrics)
        assert differ == 0 if dtype == "float32" else differ < 0.1
        assert "recorded and replayed" in made.lorad("show", "moe").stdout
        assert {version.attested for version in made.client.adapters("moe")} == {"passed"}


def test_versions_on_a_rounded_base_pass() -> None:
    with world() as made:
        made.run("rounded", "trainer.backend=fsdp", "model.quantize=nf4", "trainer.steps=2")
        assert {version.attested for version in made.client.adapters("rounded")} == {"passed"}
        made.lorad("verify", "rounded")


async def scores(trainer: Trainer) -> np.ndarray:
    """Of the base, since an adapter begins as nothing."""
    await trainer.open("slot", SLOT)
    return await trainer.logprobs(Policy("slot"), BATCH)


async def of_builtin(model: str, quantize: Quantize | None) -> np.ndarray:
    compute = Compute()
    try:
        base = load_base(BUILTIN[model], torch.float32, torch.device("cpu"), quantize)
        return await scores(BuiltinTrainer(base, compute))
    finally:
        compute.close()


@pytest.mark.parametrize("dp", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(("model", "form"), [("builtin:tiny", "nf4"), ("builtin:tiny-moe", "fp8")])
async def test_ranks_round_as_builtin(model: str, form: Quantize, dp: int, tmp_path: Path) -> None:
    wanted, plain = await of_builtin(model, form), await of_builtin(model, None)
    trainer = await started("fsdp", BUILTIN[model], tmp_path, quantize=form, dp=dp)
    try:
        found = await scores(trainer)
    finally:
        await trainer.shut_down()
    assert np.abs(found - wanted).max() < 2e-5
    assert np.abs(found - plain).max() > 1e-2
