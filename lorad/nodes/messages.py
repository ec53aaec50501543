"""What a pool and an agent say to each other: one JSON object a line.

A connection begins with `Hello`, which `Done` or `Failed` answers. Of kind:

control: requests, answers and news of children, until one side ends.
tunnel: after it, bytes to and from the Unix socket `name` of the node.
serve: the agent listens on the Unix socket `name`. A second `Done` says that somebody is there, whose bytes
    follow.
put: the bytes of `files` follow; the directory `name` then appears whole, or not at all. The agent passes
    them on to the nodes in `to`; the second `Done` says which of those have nothing.
fetch: `Files` answers instead of `Done`, and their bytes follow.
"""

from typing import Any, Literal

from msgspec import Struct

LINE = 16 << 20  # bytes; a longer line ends the connection


class FileEntry(Struct, frozen=True):
    """A file of a directory. size: bytes. sha256: hexadecimal."""

    name: str
    size: int
    sha256: str


Failures = dict[str, dict[str, Any]]
"""By node: why it has nothing, as `to_wire` writes it."""


class Peer(Struct, frozen=True):
    """Another agent of the same pool. certificate: PEM."""

    name: str
    ip: str
    port: int
    certificate: str


class Hello(Struct, frozen=True, kw_only=True):
    """Opens a connection of the pool whose life has this name; `name` is a path in the agent's directory."""

    kind: Literal["control", "tunnel", "serve", "put", "fetch"]
    life: str
    name: str = ""
    files: tuple[FileEntry, ...] = ()
    to: tuple[Peer, ...] = ()


class Request(Struct, frozen=True, tag=True, kw_only=True):
    """A request of the pool, answered by `Done` or `Failed` of the same id."""

    id: int = 0


class Renew(Request, frozen=True):
    """Says that the pool is there."""


class _NamedRequest(Request, frozen=True):
    """A request about a child, a file or a directory of the agent's."""

    name: str


class Spawn(_NamedRequest, frozen=True):
    """Start a child in the directory `name`, which is made, with `files` in it; the answer is its pid.

    follow: patterns of files there whose content is sent whenever it has changed.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    files: dict[str, str] = {}
    follow: tuple[str, ...] = ()


class Stop(_NamedRequest, frozen=True):
    """End a child; answered when nothing of it is left. grace: seconds."""

    grace: float


class Dump(_NamedRequest, frozen=True):
    """Have the stacks of what a child started written to its log."""


class Write(_NamedRequest, frozen=True):
    """Put a file in place, whole."""

    text: str


class Make(_NamedRequest, frozen=True):
    """Make a directory."""


class Remove(_NamedRequest, frozen=True):
    """Remove a directory or file; one that is not there is removed."""


class Digest(_NamedRequest, frozen=True):
    """The answer is the sha256 of a file as it is there now, "" when it is gone."""


class Weights(Request, frozen=True):
    """The answer is the sha256 of a base model's weights, see `weights_sha256`."""

    directory: str


class Trust(Request, frozen=True):
    """Take what agents with these certificates, PEM, pass on."""

    certificates: tuple[str, ...]


class Leave(Request, frozen=True):
    """Do as at SIGTERM, also where whoever started the agent is gone: its scheduler was asked to go."""


AnyRequest = Renew | Spawn | Stop | Dump | Write | Make | Remove | Digest | Weights | Trust | Leave


class AgentMessage(Struct, frozen=True, tag=True, kw_only=True):
    """A message of the agent."""


class Done(AgentMessage, frozen=True):
    id: int = 0
    value: str = ""
    failed: Failures = {}


class Failed(AgentMessage, frozen=True):
    """Refuses a request; `to_wire` made the error."""

    error: dict[str, Any]
    id: int = 0


class Files(AgentMessage, frozen=True):
    files: tuple[FileEntry, ...]


class Logged(AgentMessage, frozen=True):
    """New text in the log of a child."""

    name: str
    text: str


class Wrote(AgentMessage, frozen=True):
    """The content of a file that is followed."""

    name: str
    file: str
    text: str


class Ended(AgentMessage, frozen=True):
    """Nothing is left of a child. how: see `Child.ended`."""

    name: str
    how: str


class Leaving(AgentMessage, frozen=True):
    """The agent was asked to end. It lives until the pool lets it go: runs may stop after their step."""


ChildNews = Logged | Wrote | Ended
AnyMessage = Done | Failed | Files | ChildNews | Leaving
