"""What can go wrong with a pool over nodes of a Ray cluster, and how it is undone."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.cluster.hosts import Host
from tests.cluster.ray_kit import Cluster

AGENT, ACTOR, RAYLET = "lorad.nodes.agent", "ray::_Agent", "raylet/raylet"
RANK, LAUNCHER, GUARD = "lorad.trainers.ranks.worker", "ranks/launch.py", "children/guard.py"
GRANT, HEAD, GCS = "lorad.grants.ray", "pool_head.py", "gcs_server"
_HEALS_AFTER = 30.0  # seconds, beyond those in which everything ended
ALL = (AGENT, ACTOR, RANK, LAUNCHER, GUARD, GRANT, HEAD)


@dataclass(frozen=True)
class Fault:
    """A fault; `does` makes it, on the second of the pool's two nodes or at home.

    Attributes:
        keeps: what of ALL may stay until `undo`: a node that is cut off still has it.
        loses_node: Ray has to be started on that node again, since it may hold it for dead.
        undo: what is needed before anything can end.
        says: a word of the pool's reason.
        is_quick: it is among those that CI makes: of a node and of Ray. Processes of lorad's on a node are
            killed in tests/nodes/test_ranks.py, without Ray.
    """

    name: str
    does: Callable[[Cluster, Host], object]
    keeps: tuple[str, ...] = ()
    loses_node: bool = False
    undo: Callable[[Cluster, Host], object] | None = None
    says: str = ""
    is_quick: bool = False


def pids(host: Host, mark: str) -> list[int]:
    """List the processes of one kind; a guard's command line has that of its child in it."""
    found = host.processes().items()
    return [pid for pid, line in found if mark in line and (GUARD in line) == (mark == GUARD)]


def send(host: Host, *marks: str, number: int = signal.SIGKILL) -> None:
    """Send a signal to the processes of these kinds on a host."""
    found = [pid for mark in marks for pid in pids(host, mark)]
    assert found, f"no {marks} on {host.name}: {host.processes()}"
    for pid in found:
        os.kill(pid, number)


def _stop(host: Host, mark: str) -> None:
    send(host, mark, number=signal.SIGSTOP)


def _heal_late(host: Host) -> None:
    time.sleep(_HEALS_AFTER)
    host.heal()


FAULTS = (
    Fault("kill -9 of a rank", lambda _, node: send(node, RANK)),
    Fault("kill -9 of a launcher", lambda _, node: send(node, LAUNCHER)),
    Fault("kill -9 of a guard", lambda _, node: send(node, GUARD)),
    Fault("kill -9 of an agent", lambda _, node: send(node, AGENT)),
    Fault("kill -9 of a Ray actor", lambda _, node: send(node, ACTOR)),
    Fault("kill -9 of a raylet", lambda _, node: send(node, RAYLET), loses_node=True),
    Fault("kill -9 of raylet and actor", lambda _, node: send(node, RAYLET, ACTOR), loses_node=True),
    Fault("`ray stop` on a node", lambda ray, node: ray.stop(node), loses_node=True),
    Fault("`ray stop --force` on a node", lambda ray, node: ray.stop(node, force=True), loses_node=True),
    Fault("SIGSTOP of a rank", lambda _, node: _stop(node, RANK)),
    Fault("SIGSTOP of an agent", lambda _, node: _stop(node, AGENT)),
    Fault("kill -9 of the grant process", lambda ray, _: send(ray.home, GRANT), is_quick=True),
    Fault("kill -9 of the pool", lambda ray, _: send(ray.home, HEAD)),
    Fault(
        "SIGSTOP of the pool",
        lambda ray, _: _stop(ray.home, HEAD),
        keeps=(HEAD,),
        undo=lambda ray, _: send(ray.home, HEAD),
    ),
    Fault(
        "power cut of a node",
        lambda _, node: node.cut(),
        undo=lambda _, node: node.boot(),
        says="h2",
        loses_node=True,
        is_quick=True,
    ),
    Fault(
        "partition of a node",
        lambda _, node: node.part(),
        undo=lambda _, node: node.heal(),
        loses_node=True,
        is_quick=True,
    ),
    Fault(
        "partition of a node that heals after 40 s",
        lambda _, node: node.part(),
        undo=lambda _, node: _heal_late(node),
        loses_node=True,
    ),
)
