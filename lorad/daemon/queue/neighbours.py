"""Programs outside of lorad that compute on a device beside a run with `resources.yield_to: foreign`.

The run stops at its next step once such a program was there for `queue.foreign_after`, is queued again, and
comes back when the device stayed free for `queue.foreign_settle`. Nothing is ever done to the program.
"""

import time
from collections.abc import Iterable, Mapping

from lorad.daemon.context import Context, spec_of
from lorad.daemon.gpu.occupancy import STALE_SECONDS
from lorad.daemon.gpu.state import Neighbour
from lorad.daemon.pool import Pool
from lorad.daemon.pools.watch_gpus import look
from lorad.states import ACTIVE, RunState
from lorad.store import runs
from lorad.store.rows import RunRow


def watch_neighbours(ctx: Context) -> None:
    """Note who computes on which device since when, and which idle pools are in their way."""
    gpus = [device for device in ctx.gpus.devices if device.uuid]
    if not gpus or not (runs.queue(ctx.store) or any(map(yields, runs.in_states(ctx.store, *ACTIVE)))):
        ctx.gpus.neighbours = {}
        ctx.gpus.in_the_way = frozenset()
        return
    look(ctx)
    neighbours = ctx.gpus.neighbours
    for device in gpus:
        now = time.monotonic()
        sight = ctx.gpus.sights.seen.get(device.uuid)
        before = neighbours.get(device.name)
        present = before if before is not None and before.left is None else None
        if sight is None or sight.lost or now - sight.at > STALE_SECONDS:
            if present is not None:  # it may still be on the device, but moves no run
                neighbours[device.name] = Neighbour(present.who, now)
        elif programs := sight.foreign():
            since = sight.at if present is None else present.since
            more = f" and {len(programs) - 1} more" if len(programs) > 1 else ""
            neighbours[device.name] = Neighbour(f"{programs[0].in_words()}{more}", since)
        elif present is not None:
            neighbours[device.name] = Neighbour(present.who, present.since, sight.at)
        elif before is not None and now - (before.left or 0.0) > ctx.config.queue.foreign_settle:
            del neighbours[device.name]
    shared = {name for name in ctx.gpus.neighbours if _stays(ctx, name)}
    queued = runs.in_states(ctx.store, RunState.QUEUED) if shared else []
    left = {run.pool for run in queued if yields(run)}
    ctx.gpus.in_the_way = frozenset(
        pool.id for pool in ctx.pools.values() if pool.id in left and shared & {*pool.names}
    )


def _stays(ctx: Context, device: str) -> bool:
    """Check whether somebody is on the device, and not just for a moment."""
    neighbour = ctx.gpus.neighbours.get(device)
    if neighbour is None or neighbour.left is not None:
        return False
    return time.monotonic() - neighbour.since >= ctx.config.queue.foreign_after


def yields(run: RunRow) -> bool:
    return spec_of(run).resources.yield_to == "foreign"


def must_yield(ctx: Context, run: RunRow, pool: Pool) -> str:
    """Say to whom a run has to give its devices back; "" when it need not."""
    if not ctx.gpus.neighbours or not yields(run):
        return ""
    name = next((name for name in pool.names if _stays(ctx, name)), None)
    return "" if name is None else f"{name} is in use by {ctx.gpus.neighbours[name].who}"


def waits_for(
    run: RunRow, devices: Iterable[str], neighbours: Mapping[str, Neighbour], settle: float
) -> list[str]:
    """Say what a run that yields waits for on each of these devices that has a neighbour.

    settle: seconds for which nobody else may have been on a device before the run starts there.
    """
    reasons = []
    for device in devices if neighbours and yields(run) else ():
        neighbour = neighbours.get(device)
        if neighbour is not None and neighbour.left is None:
            reasons.append(f"{device} is in use by {neighbour.who}, to whom it yields (resources.yield_to)")
        elif neighbour is not None:
            reasons.append(
                f"{neighbour.who} left {device}; it starts when nobody else was there for {settle:g} s"
            )
    return reasons
