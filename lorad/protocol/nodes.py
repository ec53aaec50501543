"""Pools over several machines: what is asked for, and what the pool, its grant process and agents say.

A node is a machine that offers devices. An agent is lorad's process on a node, for one life of one pool. A
grant is what an outside scheduler gave such a life. The grant process connects to the pool's socket and sends
one JSON object a line, each with a `kind`; the end of the connection is the end of the grant.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

NodesKind = Literal["static", "ray"]
_Seconds = Annotated[float, Meta(gt=0)]
_Count = Annotated[int, Meta(ge=0)]
_Port = Annotated[int, Meta(ge=1, le=65535)]


class StaticNode(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A node that is named in the configuration.

    name: shown in logs; nodes are sorted by it.
    address: the IP that its agent listens at.
    command: starts a program there whose stdin and stdout are ours: `("ssh", "h1")`; () for this machine.
    devices: how many GPUs it has.
    """

    name: str
    address: str
    command: tuple[str, ...] = ()
    devices: _Count = 0


class NodesSetup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The nodes of a pool; a part of `pool.json`.

    nodes: how many have ranks (and servers, unless the mode is `split`).
    devices: GPUs of each; 0 where they have none.
    rollout_nodes: further nodes, which only have servers, in mode `split`.
    python: lorad's interpreter on the nodes; "" is the path of this one.
    interface: the network interface that ranks use; "" is the one that has the agent's address.
    lease: seconds without a word from the pool after which an agent ends everything on its node.
    patience: seconds that a request for nodes waits before the next shape is tried, and a pool without any
        server for another node.
    idle_timeout: seconds without use after which the pool gives the nodes back.
    address: where the Ray cluster is, as `ray.init` takes it.
    cluster_python: the interpreter that has the cluster's own version of Ray.
    token_file: holds the cluster's token.
    labels: what a node must have.
    insecure: a cluster without tokens is accepted.
    group: the name of the placement group, without the life.
    hosts: the nodes of `static`, in the order in which they are tried.
    memory: bytes that each GPU must have; 0: whatever it has.
    warm: addresses of nodes of a Ray cluster that are taken before others where they have room.
    """

    kind: NodesKind = "static"
    nodes: Annotated[int, Meta(ge=1)]
    devices: _Count = 0
    rollout_nodes: _Count = 0
    python: str = ""
    interface: str = ""
    lease: _Seconds = 30.0
    patience: _Seconds = 600.0
    idle_timeout: _Seconds = 60.0
    address: str = "auto"
    cluster_python: str = ""
    token_file: str = ""
    labels: dict[str, str] = {}
    insecure: bool = False
    group: str = ""
    hosts: tuple[StaticNode, ...] = ()
    memory: _Count = 0
    warm: tuple[str, ...] = ()

    @property
    def bundles(self) -> int:
        """Count the nodes that are asked for."""
        return self.nodes + self.rollout_nodes


class GrantRequest(Struct, frozen=True, kw_only=True):
    """The file `grant.json`, mode 0600, which the pool writes for its grant process.

    life: `POOL@LIFE`, of the pool that asks.
    socket: the pool's socket, which the grant process connects to.
    certificate: the pool's certificate, PEM; agents accept no other.
    agent: arguments of the node's interpreter that start an agent, without `--address`.
    """

    setup: NodesSetup
    life: str
    socket: str
    certificate: str
    agent: tuple[str, ...]


class AgentStart(Struct, frozen=True, kw_only=True):
    """The first line of an agent's stdin, which stays open: its end is the agent's.

    certificate: the pool's certificate, PEM.
    devices: GPUs that were granted there, indices or UUIDs.
    """

    certificate: str
    devices: tuple[str, ...] = ()


class GrantedNode(Struct, frozen=True, kw_only=True):
    """A node that was granted, and the agent on it; an agent says the same, in one line on stdout.

    certificate: the agent's certificate, PEM.
    directory: the agent's own directory, 0700.
    devices: UUIDs or indices of the GPUs that were granted.
    lorad: the agent's version.
    uid: whose agent it is.
    interface: the network interface that has the address; "" when it is not known.
    memory: bytes of each device; () when it is not known.
    """

    node: str
    ip: str
    port: _Port
    certificate: str
    boot_id: str
    directory: str
    devices: tuple[str, ...] = ()
    pid: int
    lorad: str
    uid: int
    interface: str = ""
    memory: tuple[_Count, ...] = ()


class WaitingGrant(Struct, frozen=True, tag="Waiting", tag_field="kind"):
    """Nothing is granted yet. words: what is lacking."""

    words: str


class Granted(Struct, frozen=True, tag="Granted", tag_field="kind"):
    """Everything that was asked for; nodes: sorted by name."""

    nodes: tuple[GrantedNode, ...]


class Refused(Struct, frozen=True, tag="Refused", tag_field="kind"):
    """Nothing will be granted."""

    words: str
    hint: str = ""


class LostNode(Struct, frozen=True, tag="Lost", tag_field="kind"):
    """A node of a grant is gone, and how, in words that follow its name: "exited with code 1".

    is_asked: its scheduler was asked to go, as by `ray stop`, and the agent may still be there.
    """

    node: str
    how: str
    is_asked: bool = False


GrantLine = WaitingGrant | Granted | Refused | LostNode

GRANT = "grant.json"
"""The file of a pool's life, beside its log: a `GrantStatus`, written anew whenever that changes. It stays
after the life is over."""
GrantState = Literal["asked", "granted", "refused", "lost"]
_Text = Annotated[str, Meta(max_length=4096)]


class GrantStatus(Struct, frozen=True, kw_only=True):
    """The state of the grant of a pool's life.

    words: what is lacking, why it was refused, or which node is lost and how.
    since: Unix time at which it came to this state.
    nodes: the nodes that were granted, sorted by name.
    leaving: names of the nodes with ranks that were asked to end.
    """

    state: GrantState
    words: _Text = ""
    hint: _Text = ""
    since: float = 0.0
    nodes: tuple[GrantedNode, ...] = ()
    leaving: tuple[str, ...] = ()


class PlacedNode(Struct, frozen=True, kw_only=True):
    """A node of an attempt; `software` is the sha256 of its versions of lorad, torch and the backend."""

    node: str
    boot_id: str
    devices: tuple[str, ...] = ()
    software: str = ""
