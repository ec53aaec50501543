"""What the daemon tells a pool whose engine is a server in a process of its own."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

UNIX = "unix:"  # how the address of a server on a Unix socket begins


class ServerSetup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Part of `pool.json`.

    python: the interpreter of the virtual environment that the server is installed in; "" with `urls`. env: added to
    its environment. servers: how many, each with the whole model; tp: devices of each. max_rank, targets (leaf names of
    linears): of the adapters that will be loaded. scaled_logprobs: some temperature is neither 0 nor 1. urls: of
    servers that the user runs, instead of starting any (http://host:port or unix:/path); key_file, admin_key_file: each
    holds one key. engine_args: the user's own flags.
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
