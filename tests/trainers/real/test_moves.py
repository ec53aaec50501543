"""A run continues from its checkpoint on another trainer, as a user would ask for it."""

import pytest

from tests.daemon.runs.test_kl_reference import told
from tests.kit.world import SMALL, world


def test_a_run_moves_between_trainers_and_topologies() -> None:
    with world() as made:
        made.run("mover", "trainer.steps=2", text=SMALL)
        made.lorad("resume", "mover", "trainer.backend=fsdp", "trainer.dp=2", "--steps", "4", "--wait")
        shown = made.client.show("mover")
        assert shown.attempts[1].changed == {"trainer.backend": "fsdp", "trainer.dp": 2}
        assert (
            "from step 2, trainer.backend=fsdp, trainer.dp=2, completed" in made.lorad("show", "mover").stdout
        )
        assert [step.step for step in made.client.steps("mover")] == [1, 2, 3, 4]
        assert all(version.attested == "passed" for version in made.client.adapters("mover"))
        assert shown.trainable is not None and 0.05 < (shown.trainable.share or 0) < 0.2
        (pool,) = [pool for pool in made.client.pools() if pool.state == "ready"]
        assert (pool.mode, pool.trainer.name) == ("resident", "fsdp")
        assert "transformers" in (pool.trainer.software or ())
        assert made.client.logs("mover", of="trainer").size >= 0
        refused = made.lorad("resume", "mover", "lora.rank=4", "--steps", "6", expect=2).stderr
        assert "lora.rank is part of what this run is" in refused


@pytest.mark.long
def test_reference_moves_with_its_run() -> None:
    """What KL is measured against is what it was."""
    with world() as made:
        made.run("a", "trainer.steps=2")
        made.run("moved", "algorithm.kl={coef: 0.3, reference: a@2}", "trainer.steps=2")
        made.lorad("rm", "a", "--yes")
        made.lorad("resume", "moved", "trainer.backend=fsdp", "--steps", "3", "--wait")
        assert len(set(told(made, "moved"))) == 1 and made.client.steps("moved")[2].metrics["kl"]
