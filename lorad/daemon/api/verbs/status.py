"""Describe the daemon and its state."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import lorad
from lorad.box.tokens import tokens_trouble
from lorad.client.box_shapes import Caller, DatabaseSize, Disk, Status
from lorad.daemon.access import is_admin
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.runs.take_in import size_of
from lorad.daemon.serving.gateways import base_url, gateway_socket
from lorad.store import runs

TROUBLES = 20  # how many things that failed and are tried again are listed


async def handle(ctx: Context, call: Call) -> Status:
    owner = None if is_admin(ctx, call.caller) else call.caller.uid
    return Status(
        pid=os.getpid(),
        version=lorad.__version__,
        home=str(ctx.home.root),
        caller=Caller(call.caller.name, is_admin(ctx, call.caller)),
        shared=ctx.users.shared,
        started_at=ctx.loop.started_at,
        gateway=gateway_socket(ctx),
        url=base_url(ctx),
        url_trouble=tokens_trouble(ctx.config.gateway) if is_admin(ctx, call.caller) else "",
        runs={str(state): number for state, number in runs.count_by_state(ctx.store).items()},
        troubles=ctx.loop.troubles.lines(owner)[:TROUBLES],
        disk=disk(ctx.runs_root),
        database=DatabaseSize(ctx.store.schema, size_of(ctx.home.database)),
    )


def disk(storage: Path) -> Disk | None:
    """Measure the filesystem that runs write to, for users other than root; None where it does not answer."""
    try:
        usage = shutil.disk_usage(storage)
    except OSError:
        return None
    return Disk(usage.free, usage.total)
