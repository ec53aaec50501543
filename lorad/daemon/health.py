"""Find live processes that do nothing, by their heartbeats, and end them: the run resumes as after a loss."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator

from lorad.box.paths import AttemptDir
from lorad.daemon.context import Context
from lorad.daemon.guarded import each, of_pool, of_run
from lorad.daemon.process.processes import child_of, read_status, shim_of, write_json
from lorad.daemon.process.pulse import Pulse, was_away
from lorad.daemon.process.stacks import dump_stacks
from lorad.daemon.services.table import living_services
from lorad.daemon.troubles import Item
from lorad.protocol.heartbeat import read_beat
from lorad.states import ACTIVE
from lorad.store import runs
from lorad.store.rows import RunRow

log = logging.getLogger("lorad.daemon")

LOOK_SECONDS = 2.0


def heal(ctx: Context) -> None:
    """Look at the processes of runs, pools and services, and put down those that hang.

    A process without a heartbeat, such as on a full disk, is only seen to be alive.
    """
    now = time.monotonic()
    limits = ctx.config.supervision
    if now - ctx.processes.looked_at < min(LOOK_SECONDS, limits.hang / 4):
        return
    away = was_away(ctx.processes.looked_at, now, limits)
    ctx.processes.looked_at = now
    owners = dict(watched(ctx))
    for attempt in ctx.processes.pulses.keys() - owners.keys():
        del ctx.processes.pulses[attempt]

    def heal_process(ctx: Context, attempt: AttemptDir) -> None:
        status = read_status(attempt)
        if status is not None and status["ended_at"] is None and not child_of(status).is_alive:
            _wake_shim(attempt)  # it may be stopped: the process is gone, and nobody recorded how
        trouble = _look(ctx, attempt, now, away)
        if trouble and attempt not in ctx.processes.put_down and not is_full(attempt):
            ctx.processes.put_down.add(attempt)
            ctx.spawn(put_down(ctx, attempt, owners[attempt][0]))

    each(ctx, heal_process, owners, lambda attempt: owners[attempt][1])
    active = runs.in_states(ctx.store, *ACTIVE)
    ctx.processes.doing = {run.name: words for run in active if (words := activity_of(ctx, run))}


def activity_of(ctx: Context, run: RunRow) -> str:
    """Say what a run's driver is doing, or its pool while the driver waits for that; "" if neither says."""
    pool = ctx.pools.get(run.pool or "")
    attempts = [run.attempt_dir, *([pool.attempt()] if pool is not None and pool.number else [])]
    return next(filter(None, map(ctx.processes.in_words, attempts)), "")


def watched(ctx: Context) -> Iterator[tuple[AttemptDir, tuple[str, Item]]]:
    """Yield each process that is looked at, with its name for the log and the item that it is part of.

    Pools come first: a process that waits for a hung pool is lost with it.
    """
    for pool in ctx.pools.values():
        if pool.process.phase == "alive":
            yield pool.attempt(), (f"pool {pool.id}", of_pool(pool))
    for run in runs.in_states(ctx.store, *ACTIVE):
        yield run.attempt_dir, ("the driver", of_run(run))
    for service, attempt in living_services(ctx):
        if ctx.processes.inspect(attempt).phase == "alive":
            yield attempt, (f"the process of {service.title}", Item(service.title))


def _look(ctx: Context, attempt: AttemptDir, now: float, away: bool = False) -> str:
    """Say what is wrong with the process; "" when nothing is."""
    beat = read_beat(attempt.heartbeat)
    pulse = ctx.processes.pulses.get(attempt)
    if beat is None:
        return ""
    if pulse is None:
        ctx.processes.pulses[attempt] = Pulse(beat, now, now, attempt.killed.exists())
        return ""
    if pulse.doubted and beat != pulse.beat:  # the earlier daemon ended before it killed the process
        pulse.doubted = False
        attempt.killed.unlink(missing_ok=True)
    pulse.see(beat, now)
    if away:
        pulse.begin_again(now)
    return pulse.trouble(now, ctx.config.supervision)


def is_full(attempt: AttemptDir) -> bool:
    """Check whether the process's disk takes nothing more, perhaps not even a heartbeat."""
    try:
        return os.statvfs(attempt.work).f_bavail == 0
    except OSError:
        return True


async def put_down(ctx: Context, attempt: AttemptDir, name: str) -> None:
    """Write down where a process hangs and why it ends, then kill it, unless it has come back meanwhile."""
    try:
        if ctx.processes.inspect(attempt).phase != "alive":
            return
        with contextlib.suppress(OSError):  # a log that takes nothing saves nobody
            await asyncio.to_thread(dump_stacks, attempt)
        now = time.monotonic()
        if not (trouble := _look(ctx, attempt, now)):
            return
        why = f"{name} {trouble}; killed"
        log.warning("%s: %s", attempt.root, why)
        with contextlib.suppress(OSError):
            write_json(attempt.killed, {"why": why, "at": time.time()})
        ctx.processes.kill_group(attempt)
        _wake_shim(attempt)
        if pulse := ctx.processes.pulses.get(attempt):
            pulse.begin_again(now)  # a process that is still there then is killed again
    finally:
        ctx.processes.put_down.discard(attempt)


def _wake_shim(attempt: AttemptDir) -> None:
    """Continue the attempt's shim if it was stopped: it has to record how its child ended."""
    status = read_status(attempt)
    if status is not None:
        with contextlib.suppress(OSError):
            shim_of(status).signal(signal.SIGCONT)
