"""The section `cluster` of config.yaml: where pools get devices beyond this machine."""

import ipaddress
import shlex
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

_Seconds = Annotated[float, Meta(gt=0)]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
_Interface = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@:-]{0,31}\Z")]
_MOST_NODES = 4096
_OF_RAY = ("address", "python", "token_file", "labels", "insecure")


class ClusterNode(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A node of a cluster of kind static.

    Attributes:
        host: its name.
        address: the IP at which its agent listens; null where `host` is an IP.
        agent: the command that starts a program there whose stdin and stdout are ours, such as `ssh h1`;
            empty for this machine.
        devices: how many GPUs it has; 0 computes on its processors.
    """

    host: _Name
    address: str | None = None
    agent: str | list[str] = ""
    devices: Annotated[int, Meta(ge=0, le=64)] = 0

    def __post_init__(self) -> None:
        try:
            ipaddress.ip_address(self.ip)
        except ValueError:
            raise ValueError(f"{self.host} has no IP: give address, such as 10.0.0.7") from None
        try:
            _ = self.command
        except ValueError as error:
            raise ValueError(f"the agent of {self.host} is no command: {error}") from None

    @property
    def ip(self) -> str:
        return self.host if self.address is None else self.address

    @property
    def command(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.agent) if isinstance(self.agent, str) else self.agent)


class Cluster(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Says where runs get devices beyond this machine, see docs/cluster.md; without it they get none.

    Attributes:
        kind: ray asks a Ray cluster for nodes, static has those in `nodes`.
        address: the Ray cluster's address, as `ray.init` takes it.
        python: the interpreter that has the cluster's own version of Ray; lorad needs none itself.
        token_file: file with the token of the Ray cluster, readable by its owner only.
        node_python: the interpreter on the nodes that has lorad; null is the path of the one here. Those of
            `backends` are paths on the nodes, too.
        device: what ranks compute on. auto is gpu with ray; with static it is gpu where nodes have devices.
        interface: the network interface of the ranks on each node; null is the one that has its address.
        labels: what a node of the Ray cluster must have.
        lease: seconds after which a node that has not heard of its pool ends everything, as the pool does
            5 seconds later with a node that it has not heard of.
        patience: seconds that a run at the head of the queue waits for nodes before others, and other ways to
            place it, are tried.
        idle_timeout: seconds that a pool without runs keeps its nodes.
        insecure: also take a Ray cluster that lets in everybody who reaches it.
        nodes: the nodes of kind static.
    """

    kind: Literal["ray", "static"]
    address: str = "auto"
    python: Path | None = None
    token_file: Path | None = None
    node_python: Path | None = None
    device: Literal["auto", "gpu", "cpu"] = "auto"
    interface: _Interface | None = None
    labels: dict[str, str] = {}
    lease: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    patience: _Seconds = 600.0
    idle_timeout: _Seconds = 60.0
    insecure: bool = False
    nodes: Annotated[list[ClusterNode], Meta(max_length=_MOST_NODES)] = []

    def __post_init__(self) -> None:
        if self.kind == "static":
            names = [node.host for node in self.nodes]
            if not names:
                raise ValueError("cluster.nodes is empty: kind static has no others")
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"two nodes of the cluster are called {twice[0]}")
            usual = {field.name: field.default for field in msgspec.structs.fields(Cluster)} | {"labels": {}}
            if changed := [key for key in _OF_RAY if getattr(self, key) != usual[key]]:
                raise ValueError(f"cluster.{changed[0]} is for kind ray; static would not use it")
        elif self.nodes:
            raise ValueError("cluster.nodes are for kind static; Ray knows its own")
        elif self.python is None:
            raise ValueError(
                "cluster.python is missing: the interpreter that has the cluster's own version of Ray"
            )

    @property
    def has_gpus(self) -> bool:
        if self.device == "auto":
            return self.kind == "ray" or any(node.devices for node in self.nodes)
        return self.device == "gpu"

    def suited(self, devices: int) -> int | None:
        """Count the nodes that have so many devices; None where only the cluster itself knows."""
        return None if self.kind == "ray" else sum(node.devices >= devices for node in self.nodes)
