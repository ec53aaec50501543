"""A run whose trainer has two ranks replays the routes of its engine."""

import pytest

from tests.kit.world import REPOSITORY, world

MOE_DEMO = REPOSITORY / "examples" / "demo-moe.yaml"
FEW = ("trainer.steps=3", "eval.every=0", "attest.amplified_every=1")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_send_tokens_where_the_engine_did(dtype: str) -> None:
    with world() as made:
        how = ("trainer.backend=fsdp", "trainer.dp=2", f"model.dtype={dtype}", "rollout.routes=record")
        made.lorad("run", MOE_DEMO, *how, *FEW, "--name", "moe", "--detach")
        made.completed("moe", seconds=420)
        metrics = [step.metrics for step in made.client.steps("moe")]
        assert len(metrics) == 3 and {m["routes_unknown"] for m in metrics} == {0.0}
        differ = max(m["routes_differ"] or 0.0 for m in metrics)
        assert differ == 0 if dtype == "float32" else differ < 0.1
        assert "recorded and replayed" in made.lorad("show", "moe").stdout
        assert {version.attested for version in made.client.adapters("moe")} == {"passed"}
