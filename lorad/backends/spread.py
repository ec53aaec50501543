"""Spread a run over the nodes of a cluster: where it may go, what it asks for, and what is refused."""

from collections.abc import Iterator
from typing import Literal

from lorad.box.cluster import Cluster
from lorad.errors import SpecError
from lorad.limits.arguments import RANKED
from lorad.protocol.nodes import NodesSetup, StaticNode
from lorad.servers.table import NAMES, SERVERS
from lorad.spec.model import Spec

Where = Literal["local", "cluster"]
_UNTIL_ENDED = 10 * 365 * 86400.0  # seconds: the daemon judges by `cluster.patience`, and ends the pool


def places(spec: Spec, cluster: Cluster | None, device: str, count: int) -> tuple[Where, ...]:
    """Say where the run may go, the first before the others; `device` and `count` describe this machine.

    Without a cluster that the spec asks for it is "cluster", which `check_spread` refuses. Servers with
    devices of their own are on this machine.
    """
    wish = spec.resources.where
    has_nodes = spec.resources.nodes > 1
    if wish == "any" and not has_nodes:
        return ("local",) if spec.server_devices else ("local", "cluster")
    if wish == "auto":
        is_too_small = cluster is not None and device != "cpu" and spec.gpus > count
        wish = "cluster" if has_nodes or (is_too_small and not spec.server_devices) else "local"
    return ("local",) if wish == "local" else ("cluster",)


def nodes_setup(spec: Spec, cluster: Cluster) -> NodesSetup:
    """Make what a pool of this run asks its cluster for; `check_spread` has taken the spec."""
    resources = spec.resources
    hosts = tuple(
        StaticNode(name=node.host, address=node.ip, command=node.command, devices=node.devices)
        for node in cluster.nodes
    )
    return NodesSetup(
        kind=cluster.kind,
        nodes=resources.nodes - resources.rollout_nodes,
        devices=spec.gpus // resources.nodes if cluster.has_gpus else 0,
        rollout_nodes=resources.rollout_nodes,
        python=str(cluster.node_python or ""),
        interface=cluster.interface or "",
        lease=cluster.lease,
        patience=_UNTIL_ENDED,
        idle_timeout=cluster.idle_timeout,
        address=cluster.address,
        cluster_python=str(cluster.python or ""),
        token_file=str(cluster.token_file or ""),
        labels=cluster.labels,
        insecure=cluster.insecure,
        hosts=hosts,
    )


def check_spread(spec: Spec, cluster: Cluster | None, where: tuple[Where, ...]) -> None:
    """Raise SpecError for a spread that cannot be; `places` has said where."""
    for wrong in (*_contradictions(spec), *_of_server_devices(spec)):
        raise wrong
    if "cluster" not in where:
        return
    if cluster is None:
        key = "nodes" if spec.resources.nodes > 1 else "where" if spec.resources.where != "auto" else ""
        raise SpecError(
            "this machine is all there is: config.yaml has no cluster",
            key=f"resources.{key}" if key else "pool.mode",
            hint="Leave it out, or write `cluster:` into config.yaml (docs/cluster.md).",
        )
    for wrong in (*_of_backends(spec, cluster), *_of_shape(spec, cluster)):
        raise wrong


def _contradictions(spec: Spec) -> Iterator[SpecError]:
    resources = spec.resources
    mode = spec.pool.mode
    if resources.rollout_nodes and mode not in ("auto", "split"):
        yield SpecError(
            f"{resources.rollout_nodes}, but with pool.mode {mode} servers share the nodes of the ranks",
            key="resources.rollout_nodes",
            hint="Leave it out, or set pool.mode to split.",
        )
    if mode == "split" and not resources.rollout_nodes and _asks_for_nodes(spec):
        yield SpecError(
            "split gives servers nodes of their own in a cluster, and resources.rollout_nodes is 0",
            key="pool.mode",
            hint="Say how many of resources.nodes are theirs: resources.rollout_nodes, or leave it out.",
        )
    if resources.rollout_nodes >= resources.nodes > 1 or (resources.rollout_nodes and resources.nodes == 1):
        yield SpecError(
            f"{resources.rollout_nodes} of {resources.nodes} leaves no node for the ranks",
            key="resources.rollout_nodes",
            hint="resources.nodes counts all nodes, those of servers as well: raise it, or lower this.",
        )
    if resources.nodes > 1 and resources.where in ("local", "any"):
        yield SpecError(
            f"{resources.where}, but resources.nodes is {resources.nodes}, and this machine is one",
            key="resources.where",
            hint="Leave it out, or set resources.nodes to 1.",
        )


def _asks_for_nodes(spec: Spec) -> bool:
    """Check whether the spec names what only a cluster has."""
    return spec.resources.nodes > 1 or spec.resources.where == "cluster"


def _of_server_devices(spec: Spec) -> Iterator[SpecError]:
    """Devices of this machine that servers have for themselves are as many as the servers take."""
    asked = spec.resources.rollout_devices
    mode = spec.pool.mode
    rollout = spec.rollout
    if asked and mode not in ("auto", "split"):
        yield SpecError(
            f"{asked}, but with pool.mode {mode} servers share the devices of the trainer",
            key="resources.rollout_devices",
            hint="Leave it out, or set pool.mode to split.",
        )
    if asked and _asks_for_nodes(spec):
        yield SpecError(
            f"{asked}, which are devices of this machine, but the run is on nodes of a cluster",
            key="resources.rollout_devices",
            hint="Leave it out; in a cluster resources.rollout_nodes gives servers nodes of their own.",
        )
    if not spec.server_devices:
        return
    key = "resources.rollout_devices" if asked else "pool.mode"
    if rollout.backend not in SERVERS or rollout.urls:
        which = "servers that you run" if rollout.urls else f"the {rollout.backend} engine"
        yield SpecError(
            f"devices for servers alone, but {which} would not be on them",
            key=key,
            hint=f"Leave it out, or let lorad start servers: rollout.backend {NAMES}.",
        )
    if (needed := rollout.servers * rollout.tp) != spec.server_devices:
        yield SpecError(
            f"{asked}, but rollout.servers ({rollout.servers}) of rollout.tp ({rollout.tp}) take {needed}",
            key=key,
            hint=f"Set rollout.servers to {max(1, asked // rollout.tp)}, or leave this out: it is {needed} "
            "with pool.mode: split.",
        )


def _of_backends(spec: Spec, cluster: Cluster) -> Iterator[SpecError]:
    trainer = spec.trainer.backend
    engine = spec.rollout.backend
    ranked = " or ".join(sorted(RANKED))
    if trainer not in RANKED:
        yield SpecError(
            f"the {trainer} trainer is a part of its pool's process, which stays on this machine",
            key="trainer.backend",
            hint=f"On a cluster, use {ranked}; or leave out resources.nodes and resources.where.",
        )
    if engine not in SERVERS and cluster.has_gpus:
        yield SpecError(
            f"the {engine} engine is a part of its pool's process, which stays on this machine; the GPUs are "
            "on the nodes",
            key="rollout.backend",
            hint=f"On a cluster with GPUs, use {NAMES}.",
        )
    if spec.resources.rollout_nodes and (engine not in SERVERS or spec.rollout.urls):
        which = "servers that you run" if engine in SERVERS else f"the {engine} engine"
        yield SpecError(
            f"nodes for servers alone, but {which} would not be on them",
            key="resources.rollout_nodes",
            hint=f"Leave it out, or let lorad start servers: rollout.backend {NAMES}.",
        )
    if spec.algorithm.teacher and cluster.has_gpus:
        yield SpecError(
            "the pool's process, which stays on this machine, holds the teacher; the GPUs are on the nodes",
            key="algorithm.teacher",
            hint="Leave it out, or run on this machine: resources.where local.",
        )
    if spec.resources.yield_to is not None:
        yield SpecError(
            "who else is on a node of a cluster is not looked at, so nothing would be given back",
            key="resources.yield_to",
            hint="Leave it out.",
        )


def _of_shape(spec: Spec, cluster: Cluster) -> Iterator[SpecError]:
    """Ranks and devices are as many on each node, and no tensor-parallel group crosses nodes."""
    resources = spec.resources
    ranks = spec.trainer.ranks
    training = resources.nodes - resources.rollout_nodes
    if ranks % training:
        yield SpecError(
            f"{ranks} ranks are not as many on each of {training} nodes",
            key="resources.nodes",
            hint="It must divide tp x pp x cp x dp of the trainer (without the nodes for servers).",
        )
    if not cluster.has_gpus:
        if resources.devices is not None:
            yield SpecError(
                f"{resources.devices}, but the nodes of the cluster have no GPUs",
                key="resources.devices",
                hint="Leave it out, or correct cluster.device or cluster.nodes in config.yaml.",
            )
    else:
        if spec.gpus % resources.nodes:
            yield SpecError(
                f"{resources.nodes} nodes do not divide {spec.gpus} devices",
                key="resources.nodes",
                hint="Each node gives as many: change it, or resources.devices, which counts all nodes.",
            )
        if ranks // training > (per_node := spec.gpus // resources.nodes):
            yield SpecError(
                f"{ranks // training} ranks on each node, but {per_node} devices there",
                key="resources.devices",
                hint=f"Ask for {ranks // training * resources.nodes} or more, or for more nodes.",
            )
    yield from _of_servers(spec, cluster)


def _of_servers(spec: Spec, cluster: Cluster) -> Iterator[SpecError]:
    resources = spec.resources
    training = spec.resources.nodes - spec.resources.rollout_nodes
    size = spec.gpus // resources.nodes if cluster.has_gpus else spec.trainer.ranks // training
    for key, tp in (("trainer.tp", spec.trainer.tp), ("rollout.tp", spec.rollout.tp)):
        if size % tp and (cluster.has_gpus or key == "trainer.tp"):
            yield SpecError(
                f"{tp} does not divide the {size} {'devices' if cluster.has_gpus else 'ranks'} of a node, so "
                "that a group would cross nodes, whose links are slow",
                key=key,
                hint=f"Use a divisor of {size}, or another resources.nodes.",
            )
    servers = spec.rollout.servers if spec.rollout.backend in SERVERS and not spec.rollout.urls else 0
    holders = resources.rollout_nodes or resources.nodes
    if servers and servers % holders:
        yield SpecError(
            f"{servers} servers are not as many on each of {holders} nodes",
            key="rollout.servers",
            hint=f"Use a multiple of {holders}.",
        )
    if cluster.has_gpus and servers * spec.rollout.tp > holders * size:
        yield SpecError(
            f"{servers} servers of {spec.rollout.tp} devices need more than the {holders * size} of their "
            "nodes",
            key="rollout.servers",
            hint="Lower it, or raise resources.devices.",
        )
    per_node = size if cluster.has_gpus else 0
    if (suited := cluster.suited(per_node)) is not None and suited < resources.nodes:
        of = f" with {per_node} GPUs" if per_node else ""
        yield SpecError(
            f"{resources.nodes}, but the cluster has {suited} node{'' if suited == 1 else 's'}{of}",
            key="resources.nodes",
            hint="Lower it, or add nodes to `cluster` in config.yaml.",
        )
