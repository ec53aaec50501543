"""What can go wrong with a node of a grant, and how it is undone."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.cluster.hosts import Host
from tests.cluster.ray_kit import Cluster

AGENT, ACTOR, RAYLET, GRANT, GCS = (
    "stub_agent",
    "ray::_Agent",
    "raylet/raylet",
    "lorad.grants.ray",
    "gcs_server",
)


@dataclass(frozen=True)
class Fault:
    """A fault of one node.

    Attributes:
        does: makes it.
        loses_node: Ray has to be started there again.
        undo: what else is needed before that.
    """

    name: str
    does: Callable[[Cluster, Host], object]
    loses_node: bool = False
    undo: Callable[[Host], None] | None = None


def kill(host: Host, *marks: str, number: int = signal.SIGKILL) -> None:
    """Send a signal to the processes of a host with these marks in their command lines."""
    found = [pid for mark in marks for pid in host.pids(mark)]
    assert found, f"no {marks} on {host.name}: {host.processes()}"
    for pid in found:
        os.kill(pid, number)


NODE_FAULTS = (
    Fault("kill -9 of the agent", lambda _, node: kill(node, AGENT)),
    Fault("kill -9 of the Ray actor", lambda _, node: kill(node, ACTOR)),
    Fault("kill -9 of the raylet", lambda _, node: kill(node, RAYLET), loses_node=True),
    Fault("kill -9 of raylet and actor", lambda _, node: kill(node, RAYLET, ACTOR), loses_node=True),
    Fault("ray stop on the node", lambda ray, node: ray.stop(node), loses_node=True),
    Fault("ray stop --force on the node", lambda ray, node: ray.stop(node, force=True), loses_node=True),
    Fault("power cut of the node", lambda _, node: node.cut(), loses_node=True, undo=Host.boot),
)


def mended(cluster: Cluster, node: Host, fault: Fault) -> Iterator[None]:
    """Bring a node back once the caller is done."""
    yield
    if fault.undo:
        fault.undo(node)
    if fault.loses_node:
        cluster.stop(node, force=True)
        cluster.join([node])
