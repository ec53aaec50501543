"""The door for Tinker's client, while `tinker.port` of config.yaml names a port.

It makes its runs as everybody does, on the daemon's socket. In a shared daemon there is a front, which is the
daemon's and knows the keys; behind it each user who has asked has a door, which runs as that user.
"""

import time
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from lorad.box.config import DOOR_SETTINGS
from lorad.box.paths import AttemptDir
from lorad.daemon.beside.kept import Kept, keep, put_away, state_of, stop
from lorad.daemon.context import Context, spec_of
from lorad.daemon.guarded import each, guarded
from lorad.daemon.process.user_files import passable
from lorad.daemon.troubles import Item
from lorad.states import RunState
from lorad.store import runs

_UNWANTED_SECONDS = 600.0  # after which the door of a user ends who has no model, and did not ask
_HAVE_DOOR = (RunState.QUEUED, RunState.STARTING, RunState.RUNNING, RunState.STOPPING)


def keep_door(ctx: Context) -> None:
    """Keep every door that is wanted up. Trouble with that of one user affects no other."""

    def keep_owners(ctx: Context, uid: int) -> None:
        if owners[uid] and ctx.config.tinker.port is not None:
            keep(ctx, _door_of(ctx, uid), wanted=True)
        else:
            put_away(ctx, _door_of(ctx, uid))

    guarded(ctx, Item("the Tinker door"), _keep)
    owners = _owners(ctx)
    each(ctx, keep_owners, owners, lambda uid: Item(f"the Tinker door of user {uid}", uid))


def _keep(ctx: Context) -> None:
    """Raises what `keep` raises."""
    if ctx.config.tinker.port is not None:
        if ctx.users.shared:
            passable(ctx.home.tinker)
        keep(ctx, _door(ctx), wanted=True)
    elif ctx.home.tinker.is_dir():
        put_away(ctx, _door(ctx))


def _owners(ctx: Context) -> dict[int, bool]:
    """Find the users of a shared daemon with a door of their own, and whether each is wanted.

    One is wanted while its user has models that are not paused, as it pauses them, or asked recently. A new
    daemon does not know who asked: a door that is up stays for a while.
    """
    if not ctx.users.shared:
        return {}
    root, asked = ctx.home.tinker / "owners", ctx.serving.doors_asked
    there = {int(path.name) for path in root.iterdir() if path.name.isdigit()} if root.is_dir() else set()
    for uid in there - asked.keys():
        asked[uid] = time.monotonic() if state_of(ctx, _door_of(ctx, uid)).is_up else float("-inf")
    recent = time.monotonic() - _UNWANTED_SECONDS
    wanted = {uid for uid, at in asked.items() if at > recent}
    if there:
        active = runs.in_states(ctx.store, *_HAVE_DOOR)
        wanted |= {run.owner_uid for run in active if spec_of(run).algorithm.kind == "tinker"} & there
    return {uid: uid in wanted for uid in sorted(there | wanted)}


def want_door_of(ctx: Context, uid: int) -> None:
    """Have the door of a user up, for a while."""
    ctx.serving.doors_asked[uid] = time.monotonic()
    ctx.loop.poke()


def _door(ctx: Context) -> Kept:
    """Describe the door that every client asks."""
    settings: dict[str, object] = msgspec.to_builtins(ctx.config.tinker, enc_hook=str)
    root, home = ctx.home.tinker, str(ctx.home.root)
    arguments = (home, "front") if ctx.users.shared else (home,)
    return Kept("tinker", "the Tinker door", root, root, arguments, settings, {})


def _door_of(ctx: Context, uid: int) -> Kept:
    """Describe the door of one user, in a shared daemon."""
    root, user = ctx.home.tinker_of(uid), ctx.user(uid)
    settings = msgspec.to_builtins(replace(ctx.config.tinker, port=None, keys=None), enc_hook=str)
    title, arguments = f"the Tinker door of {user.name if user else uid}", (str(ctx.home.root), "owner")
    work, environment = ctx.home.tinker_socket_of(uid).parent, {DOOR_SETTINGS: _json(settings)}
    return Kept("tinker", title, root, work, arguments, settings, environment, user)


def _json(settings: dict[str, object]) -> str:
    return msgspec.json.encode(settings).decode()


def _doors(ctx: Context) -> Iterator[Kept]:
    """Yield every door that there may be."""
    yield _door(ctx)
    yield from (_door_of(ctx, uid) for uid in _owners(ctx))


def living_doors(ctx: Context) -> Iterator[AttemptDir]:
    """Yield the newest life of each door."""
    for door in _doors(ctx):
        yield from door.lives[-1:]


def stop_door(ctx: Context) -> bool:
    """Ask all to end when their requests have; False when there is none that everybody asks."""
    public, *_ = [stop(ctx, door) for door in _doors(ctx)]
    return public
