"""The door for Tinker's client, while `tinker.port` of config.yaml names a port.

It makes its runs as everybody does, on the daemon's socket.
"""

from collections.abc import Iterator

import msgspec

from lorad.box.paths import AttemptDir
from lorad.daemon.beside.kept import Kept, keep, put_away, stop
from lorad.daemon.context import Context
from lorad.daemon.guarded import guarded
from lorad.daemon.troubles import Item
from lorad.errors import Conflict


def keep_door(ctx: Context) -> None:
    """Keep the door up while it is wanted."""
    guarded(ctx, Item("the Tinker door"), _keep)


def _keep(ctx: Context) -> None:
    """Raises Conflict in a shared home, and what `keep` raises."""
    is_wanted = ctx.config.tinker.port is not None
    if is_wanted and ctx.users.shared:
        raise Conflict(
            "tinker.port of config.yaml is set in a home that several users share, which has no door yet",
            hint="Leave it out; each user can have a daemon and a door of their own.",
        )
    if is_wanted:
        keep(ctx, _door(ctx), wanted=True)
    elif ctx.home.tinker.is_dir():
        put_away(ctx, _door(ctx))


def _door(ctx: Context) -> Kept:
    settings: dict[str, object] = msgspec.to_builtins(ctx.config.tinker, enc_hook=str)
    root = ctx.home.tinker
    return Kept("tinker", "the Tinker door", root, root, (str(ctx.home.root),), settings, {})


def living_doors(ctx: Context) -> Iterator[AttemptDir]:
    """Yield its newest life, if there is any."""
    yield from _door(ctx).lives[-1:]


def stop_door(ctx: Context) -> bool:
    """Ask it to end when its requests have; False when there is none."""
    return stop(ctx, _door(ctx))
