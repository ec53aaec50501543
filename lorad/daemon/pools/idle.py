"""How long an idle pool stays up, and which GPUs it holds."""

from __future__ import annotations

import time

from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import Device
from lorad.daemon.gpu.lock_notes import LOOK_SECONDS, wanted_by_others
from lorad.daemon.pool import Pool


def timeout_of(ctx: Context, pool: Pool) -> float:
    """Choose how many seconds the pool stays warm when idle: few when another daemon waits for one of its
    devices.
    """
    uuids = {device.uuid for device in ctx.gpus.devices if device.uuid}
    if uuids and time.monotonic() - ctx.gpus.notes.looked_at > LOOK_SECONDS:
        ctx.gpus.notes.looked_at, ctx.gpus.notes.others = (
            time.monotonic(),
            wanted_by_others(ctx.home.root, uuids),
        )
    is_wanted = any(device.uuid in ctx.gpus.notes.others for device in devices_of(ctx, pool))
    usual = ctx.config.idle_timeout
    return min(usual, ctx.config.queue.idle_timeout_wanted) if is_wanted else usual


def devices_of(ctx: Context, pool: Pool) -> list[Device]:
    """List the GPUs that a pool has."""
    return [device for device in ctx.gpus.devices if device.uuid and device.name in pool.setup.names]
