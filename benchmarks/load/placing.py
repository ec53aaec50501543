"""`make bench-placing`: a pass of the queue over a cluster of 125 nodes with 8 GPUs each, 50 runs queued."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from lorad.box.cluster import Cluster, ClusterNode
from lorad.box.config import Backend
from lorad.daemon.queue.place import place_runs
from lorad.protocol.nodes import GrantStatus
from lorad.protocol.preflight import SpecFacts
from tests.kit.daemon_world import open_context, submit

NODES, RUNS, PASSES = 125, 50, 20


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lr-") as home:
        nodes = [ClusterNode(host=f"h{n}", address=f"10.0.0.{n}", devices=8) for n in range(NODES)]
        cluster = Cluster(kind="static", nodes=nodes)
        ctx = open_context(Path(home), backends={"sglang": Backend(python=Path("/sglang"))}, cluster=cluster)
        for number in range(RUNS):
            wide = 1 << number % 6
            asked = {"nodes": wide, "devices": 8 * wide, "where": "cluster", "priority": number % 3}
            sections: dict[str, Any] = {"resources": asked, "trainer": {"backend": "fsdp", "dp": 8 * wide}}
            sections["rollout"] = {"backend": "sglang", "servers": wide, "tp": 8}
            submit(ctx, f"run-{number}", f"/models/{number}", facts=SpecFacts(max_positions=4096), **sections)
        place_runs(ctx)  # the first run has asked for nodes, the others wait for it
        waiting, granted = _passes(ctx), []
        for _ in range(PASSES):
            for pool in ctx.pools.values():
                pool.grant = GrantStatus(state="granted")
            granted.append(_timed(ctx))
        print(f"{NODES * 8} devices, {RUNS} runs in the queue, milliseconds of a pass: median (most)")
        for name, found in (("all wait", waiting), ("one is placed", granted)):
            print(f"{name:14} {statistics.median(found):6.1f} ({max(found):.1f})")


def _passes(ctx: Any) -> list[float]:
    return [_timed(ctx) for _ in range(PASSES)]


def _timed(ctx: Any) -> float:
    began = time.process_time()
    place_runs(ctx)
    return 1000 * (time.process_time() - began)


if __name__ == "__main__":
    main()
