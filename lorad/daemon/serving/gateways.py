"""Which gateways there are, from the first alias, pin or served base on.

A daemon of one user has one gateway. A shared daemon has a front, which is the daemon's and opens no files of
users; behind it each owner of what is served has a gateway, which runs as that user and reads their files.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator

import msgspec

from lorad.box.paths import AttemptDir
from lorad.daemon.beside.kept import Kept, keep, put_away, state_of, stop
from lorad.daemon.context import Context
from lorad.daemon.guarded import each, guarded
from lorad.daemon.process.doing import doing
from lorad.daemon.process.users import Caller
from lorad.daemon.troubles import Item
from lorad.protocol.listener import FOR_ALL, answers
from lorad.store.runs import owners_served
from lorad.store.versions import is_anything_served

UP_SECONDS = 15.0  # for its first answer
# after which the gateway of an owner ends who has nothing to serve, and was not asked for
UNWANTED_SECONDS = 600.0


def keep_gateways(ctx: Context) -> None:
    """Keep every gateway that is wanted up. Trouble with that of one owner affects no other."""

    def keep_public(ctx: Context) -> None:
        keep(ctx, public_gateway(ctx), wanted=is_wanted(ctx))

    def keep_owners(ctx: Context, uid: int) -> None:
        if owners[uid]:
            keep(ctx, gateway_of(ctx, uid), wanted=True)
        else:
            put_away(ctx, gateway_of(ctx, uid))

    guarded(ctx, Item("the gateway"), keep_public)
    owners = gateway_owners(ctx)
    each(ctx, keep_owners, owners, lambda uid: Item(f"the gateway of user {uid}", uid))


def is_wanted(ctx: Context) -> bool:
    return is_anything_served(ctx.store)


def gateway_owners(ctx: Context) -> dict[int, bool]:
    """Find the users of a shared daemon with a gateway of their own, and whether each gateway is wanted.

    One is wanted while its owner has something to serve, or their versions were asked for recently; one that
    is not wanted any more may still be up. A new daemon does not know whose versions were asked for: a
    gateway that is up stays for a while.
    """
    if not ctx.users.shared:
        return {}
    owners, asked = ctx.home.gateway / "owners", ctx.serving.gateways_asked
    there = {int(path.name) for path in owners.iterdir() if path.name.isdigit()} if owners.is_dir() else set()
    for uid in there - asked.keys():
        asked[uid] = time.monotonic() if state_of(ctx, gateway_of(ctx, uid)).is_up else float("-inf")
    recent = time.monotonic() - UNWANTED_SECONDS
    wanted = {uid for uid, at in asked.items() if at > recent} | owners_served(ctx.store)
    return {uid: uid in wanted for uid in sorted(there | wanted)}


def want_gateway_of(ctx: Context, uid: int) -> None:
    """Have the gateway of an owner up, for a while."""
    ctx.serving.gateways_asked[uid] = time.monotonic()
    if ctx.users.shared and uid not in ctx.serving.tables:
        ctx.serving.served += 1  # what is theirs is written down for it
    ctx.loop.poke()


def public_gateway(ctx: Context) -> Kept:
    """Describe the gateway that every client asks."""
    settings: dict[str, object] = msgspec.to_builtins(ctx.config.gateway, enc_hook=str)
    front = ctx.users.front(ctx.config.sharing)
    arguments = (str(ctx.home.root), "front") if front else (str(ctx.home.root),)
    environment = {FOR_ALL: "1" if front.get("for_all") else None}
    root = ctx.home.gateway
    return Kept("gateway", "gateway", root, root, arguments, settings | front, environment)


def gateway_of(ctx: Context, uid: int) -> Kept:
    """Describe the gateway of one owner, in a shared daemon."""
    root, user = ctx.home.gateway_of(uid), ctx.user(uid)
    work = root if user is None else ctx.home.gateway_socket_of(uid).parent
    title, arguments = f"gateway of {user.name if user else uid}", (str(ctx.home.root), "owner")
    return Kept("gateway", title, root, work, arguments, {"role": "owner"}, {}, user)


def _gateways(ctx: Context) -> Iterator[Kept]:
    """Yield every gateway that there may be."""
    yield public_gateway(ctx)
    yield from (gateway_of(ctx, uid) for uid in gateway_owners(ctx))


def living_gateways(ctx: Context) -> Iterator[AttemptDir]:
    """Yield the newest life of each gateway."""
    for gateway in _gateways(ctx):
        yield from gateway.lives[-1:]


async def stop_gateway(ctx: Context) -> bool:
    """Ask all to end when their requests have; False when there is none that everybody asks.

    One that is starting has no process to ask yet: it is waited for.
    """
    deadline = time.monotonic() + UP_SECONDS
    every = [*_gateways(ctx)]
    while any(state_of(ctx, one).phase == "starting" for one in every):
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.02)
    public, *_ = [stop(ctx, gateway) for gateway in every]
    return public


def gateway_socket(ctx: Context, caller: Caller) -> str | None:
    """Find the socket on which the gateway answers a caller now; None while it does not. Where users see what
    is theirs alone, they cannot open the front's without a token: theirs is that of their own gateway.
    """
    socket = ctx.home.gateway_socket
    is_private = ctx.users.shared and ctx.config.sharing.read != "all"
    if is_private and caller.uid != os.geteuid():
        socket = ctx.home.gateway_socket_of(caller.uid)
    return str(socket) if answers(socket) else None


def gateway_address(ctx: Context, caller: Caller) -> dict[str, str | None]:
    """Find where the gateway answers a caller now, as answers of the daemon have it: its socket, the base URL
    of its port on 127.0.0.1, and the file of the key for that; None for what there is not.
    """
    socket, settings = gateway_socket(ctx, caller), ctx.config.gateway
    port = str(settings.fixed_port) if settings.fixed_port else None
    if port is None and socket and settings.port == "auto" and not ctx.users.shared:
        with contextlib.suppress(FileNotFoundError):  # the machine gave it no port
            port = ctx.home.gateway_port.read_text()
    has_key = port is not None and not ctx.users.shared
    url = None if port is None else f"http://127.0.0.1:{port}/v1"
    return {"gateway": socket, "url": url, "key_file": str(ctx.home.gateway_key) if has_key else None}


async def gateway_up(ctx: Context, caller: Caller) -> dict[str, str | None]:
    """Wait until the gateway answers, or for as long as that should take. Returns its address.

    The loop starts it: whoever made it wanted has poked the loop.
    """
    doing().tell("waiting for the gateway")
    deadline = time.monotonic() + UP_SECONDS
    while gateway_socket(ctx, caller) is None and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return gateway_address(ctx, caller)
