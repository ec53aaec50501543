"""How to start an engine that is a server in a process of its own: what the daemon writes for the pool."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

UNIX = "unix:"  # how the address of a server on a Unix socket begins


class ServerSetup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to start or reach the servers; a part of `pool.json`.

    python: the interpreter of the virtual environment that the server is installed in; "" with `urls`.
    env: added to its environment.
    servers: how many there are, each with the whole model.
    tp: how many devices each has.
    max_rank: the largest rank of the adapters that will be loaded.
    targets: leaf names of the linears that these adapters change.
    scaled_logprobs: some temperature is neither 0 nor 1.
    urls: servers that the user runs, instead of starting any (http://host:port or unix:/path).
    key_file, admin_key_file: files that hold one key each.
    engine_args: the user's own flags.
    """

    python: str = ""
    env: dict[str, str] = {}
    servers: Annotated[int, Meta(ge=1)] = 1
    tp: Annotated[int, Meta(ge=1)] = 1
    max_rank: Annotated[int, Meta(ge=1)]
    targets: tuple[str, ...]
    context_length: Annotated[int, Meta(ge=2)]
    scaled_logprobs: bool = False
    urls: tuple[str, ...] = ()
    key_file: str | None = None
    admin_key_file: str | None = None
    engine_args: dict[str, Any] = {}
