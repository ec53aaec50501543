"""Which pool a run asks for: on each group of devices to train there, and of which base to be served."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from lorad.box.runtime import Why
from lorad.daemon.context import Context, request_of, spec_of
from lorad.daemon.gpu.devices import Device
from lorad.daemon.pool import names_of, setup_for
from lorad.daemon.pools.threads import threads_of
from lorad.errors import LoradError, SpecError
from lorad.protocol.pool_setup import PoolSetup
from lorad.store.rows import RunRow

Devices = tuple[Device, ...]
Asked = dict[Devices, tuple[PoolSetup, Why]]


def asked_of(ctx: Context, run: RunRow) -> Asked:
    """Find the smallest pool that suits the run on each group of devices, and why it has that many threads.

    Raises SpecError, StorageError.
    """
    groups, request = _groups(ctx, run), request_of(run)
    threads = threads_of(ctx, run, {devices[0].kind for devices in groups})
    setup = setup_for(
        spec_of(run),
        ctx.config,
        *groups[0],
        model_path=request.model_path,
        dtype=request.model_dtype,
        threads=1,
        facts=request.facts,
        cwd=request.cwd,
    )
    asked: Asked = {}
    for devices in groups:
        kind = devices[0].kind
        count, why = threads[kind]
        asked[devices] = (
            replace(setup, threads=count, device=kind, devices=names_of(devices), owner=run.owner_uid),
            why,
        )
    return asked


def base_of(ctx: Context, run: RunRow) -> PoolSetup | None:
    """Describe the pool that serves versions of the run, to compare it with `PoolSetup.serves`; None when no
    pool can: the run's files are gone, or its backend or its GPUs.
    """
    try:
        return next(setup for setup, _ in asked_of(ctx, run).values())
    except (OSError, msgspec.MsgspecError, LoradError):
        return None


def _groups(ctx: Context, run: RunRow) -> list[Devices]:
    """List the groups of neighbouring devices that suit a run; on the CPU all ranks share one.

    Raises SpecError.
    """
    devices = ctx.gpus.devices
    count = 1 if devices[0].is_cpu else spec_of(run).gpus
    if count > len(devices):
        raise SpecError(f"it needs {count} GPUs, this machine has {len(devices)}")
    return [tuple(devices[first : first + count]) for first in range(len(devices) - count + 1)]
