"""The doors for Tinker's client, while `tinker.port` of config.yaml names a port.

A door makes its runs as everybody does, on the daemon's socket. In a shared daemon there is a front, which is
the daemon's and knows the keys; behind it each user who has asked has a door, which runs as that user.
"""

import msgspec
from msgspec.structs import replace

from lorad.box.config import DOOR_SETTINGS
from lorad.daemon.context import Context, spec_of
from lorad.daemon.services.service import (
    OWN,
    Launch,
    Service,
    ServiceProcess,
    Upkeep,
    while_needed,
    with_directory,
)
from lorad.states import RunState
from lorad.store import runs

_UNWANTED_SECONDS = 600.0  # for which the door of a user without a model stays
_HAVE_DOOR = (RunState.QUEUED, RunState.STARTING, RunState.RUNNING, RunState.STOPPING)


def _look(ctx: Context) -> dict[int, Upkeep]:
    """Keep the own door up while it has a port; in a shared daemon also those of users who asked lately, or
    have a model that their door has not paused.
    """
    users = with_directory(ctx, DOOR) if ctx.users.shared else set()
    if ctx.config.tinker.port is None:
        return dict.fromkeys([OWN, *users], "away")
    active = runs.in_states(ctx.store, *_HAVE_DOOR) if users else []
    at_work = {run.owner_uid for run in active if spec_of(run).algorithm.kind == "tinker"} & users
    doors = while_needed(ctx, DOOR, at_work, seconds=_UNWANTED_SECONDS)
    doors[OWN] = "up"
    return doors


def _launch(ctx: Context, process: ServiceProcess) -> Launch:
    home = str(ctx.home.root)
    if process.uid == OWN:
        settings = msgspec.to_builtins(ctx.config.tinker, enc_hook=str)
        return Launch((home, "front") if ctx.users.shared else (home,), settings)
    settings = msgspec.to_builtins(replace(ctx.config.tinker, port=None, keys=None), enc_hook=str)
    return Launch((home, "owner"), settings, {DOOR_SETTINGS: msgspec.json.encode(settings).decode()})


DOOR = Service("tinker", "the Tinker door", _look, _launch)
