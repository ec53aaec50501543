"""The gateways: which there are, from the first alias, pin or served base on, and where they answer.

A daemon of one user has one gateway. A shared daemon has a front, which is the daemon's and opens no files of
users; behind it each owner of what is served has a gateway, which runs as that user and reads their files.
"""

import asyncio
import contextlib
import os
import time

import msgspec

from lorad.daemon.context import Context
from lorad.daemon.process.doing import doing
from lorad.daemon.process.users import Caller
from lorad.daemon.services.service import OWN, Launch, Service, ServiceProcess, Upkeep, need, while_needed
from lorad.protocol.listener import FOR_ALL, answers
from lorad.store.runs import owners_served
from lorad.store.versions import is_anything_served

UP_SECONDS = 15.0  # for its first answer
UNWANTED_SECONDS = 600.0  # for which the gateway of an owner who has nothing to serve stays


def _look(ctx: Context) -> dict[int, Upkeep]:
    """Keep the own gateway up from when something is first served; in a shared daemon also that of each owner
    who has something to serve, or whose versions were asked for lately.
    """
    gateways = while_needed(ctx, GATEWAY, owners_served(ctx.store), seconds=UNWANTED_SECONDS)
    gateways[OWN] = "up" if is_anything_served(ctx.store) else "stays"
    return gateways


def _launch(ctx: Context, process: ServiceProcess) -> Launch:
    home = str(ctx.home.root)
    if process.uid != OWN:
        return Launch((home, "owner"), {"role": "owner"})
    settings: dict[str, object] = msgspec.to_builtins(ctx.config.gateway, enc_hook=str)
    if not ctx.users.shared:
        return Launch((home,), settings, {FOR_ALL: None})
    for_all = ctx.config.sharing.read == "all"  # else only owners see what is theirs, and they need a token
    settings |= {"for_all": for_all, "role": "front"}
    return Launch((home, "front"), settings, {FOR_ALL: "1" if for_all else None})


GATEWAY = Service(
    "gateway", "the gateway", _look, _launch, retried="The gateway uses its old table until then."
)


def want_gateway_of(ctx: Context, uid: int) -> None:
    """Have the gateway of an owner up, for a while."""
    need(ctx, GATEWAY, [uid])
    if ctx.users.shared and (GATEWAY.name, uid) not in ctx.services.tables:
        ctx.serving.served += 1  # what is theirs is written down for it
    ctx.loop.poke()


def gateway_socket(ctx: Context, caller: Caller) -> str | None:
    """Find the socket on which the gateway answers a caller now; None while it does not. Where users see only
    what is theirs, they cannot open the front's socket without a token, and use that of their own gateway.
    """
    socket = ctx.home.gateway_socket
    is_private = ctx.users.shared and ctx.config.sharing.read != "all"
    if is_private and caller.uid != os.geteuid():
        socket = ctx.home.gateway_socket_of(caller.uid)
    return str(socket) if answers(socket) else None


def gateway_address(ctx: Context, caller: Caller) -> dict[str, str | None]:
    """Return the fields of an answer that say where the gateway answers a caller now: its socket, the base
    URL of its port on 127.0.0.1, and the file of the key for that; None for what there is not.
    """
    socket = gateway_socket(ctx, caller)
    settings = ctx.config.gateway
    port = str(settings.fixed_port) if settings.fixed_port else None
    if port is None and socket and settings.port == "auto" and not ctx.users.shared:
        with contextlib.suppress(FileNotFoundError):  # the machine gave it no port
            port = ctx.home.gateway_port.read_text()
    has_key = port is not None and not ctx.users.shared
    url = None if port is None else f"http://127.0.0.1:{port}/v1"
    return {"gateway": socket, "url": url, "key_file": str(ctx.home.gateway_key) if has_key else None}


async def gateway_up(ctx: Context, caller: Caller) -> dict[str, str | None]:
    """Wait until the gateway answers, or for as long as its start should take. Returns its address."""
    doing().tell("waiting for the gateway")
    deadline = time.monotonic() + UP_SECONDS
    while gateway_socket(ctx, caller) is None and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return gateway_address(ctx, caller)
