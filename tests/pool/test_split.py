"""A pool whose servers have devices of this machine for themselves, beside the trainer's."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from lorad.protocol.pool_setup import ServerSetup
from tests.kit.pool_kit import running_pool, until

CHANGES: dict[str, Any] = {
    "mode": "split",
    "devices": ("cpu:0", "cpu:1", "cpu:2"),
    "rollout_devices": 2,
    "server": ServerSetup(
        python=sys.executable, servers=2, max_rank=16, targets=("q_proj",), context_length=64
    ),
    "engine_class": "tests.kit.fakes.stub_engine:StubEngine",
}


def test_a_lost_server_costs_itself_alone(tmp_path: Path) -> None:
    """It is started again, and the other one is as it was."""
    with running_pool(tmp_path, **CHANGES) as running:
        fleet = running.pool.engine._fleet  # type: ignore[attr-defined]
        lost = fleet.servers[1]
        own, other = lost.process.pid, fleet.servers[0].process.pid
        os.kill(own, signal.SIGKILL)
        until(lambda: lost.state == "up" and lost.process.pid != own)
        assert running.pool.info.mode == "split"
        assert fleet.servers[0].process.pid == other and len(fleet.serving) == 2
