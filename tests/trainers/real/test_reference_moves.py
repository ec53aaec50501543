"""What KL is measured against stays the same when a run moves to another trainer."""

from tests.daemon.runs.test_kl_reference import told
from tests.kit.world import world


def test_reference_moves_with_its_run() -> None:
    with world() as made:
        made.run("a", "trainer.steps=2")
        made.run("moved", "algorithm.kl={coef: 0.3, reference: a@2}", "trainer.steps=2")
        made.lorad("rm", "a", "--yes")
        made.lorad("resume", "moved", "trainer.backend=fsdp", "--steps", "3", "--wait")
        assert len(set(told(made, "moved"))) == 1 and made.client.steps("moved")[2].metrics["kl"]
