"""How an attempt ended, once its driver is gone."""

from __future__ import annotations

import logging
import signal
import time

from lorad.daemon.context import Context, attempt_dir, run_dir, spec_of
from lorad.daemon.facts import end_of, last_facts
from lorad.daemon.futile import excuse, futile_attempts
from lorad.daemon.pools import stop_pool
from lorad.daemon.processes import ProcessState, log_tail
from lorad.daemon.prune import prune
from lorad.daemon.tenants import life_number, life_of, tenants_of
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.db import Row
from lorad.store.ingest import ingest

log = logging.getLogger("lorad.daemon")

FUTILE = 3  # attempts in a row without a step further than ever before: no more automatic restarts
MENDABLE = (EndReason.FAILED, EndReason.LOST)


def settle(ctx: Context, run: Row, driver: ProcessState) -> None:
    """Move a run whose driver is gone to where it belongs: ended, paused, or queued again."""
    name = run["name"]
    ingest(ctx.store, name, run_dir(run).journal)
    reason, detail = verdict(ctx, run, driver)
    if reason is EndReason.STOPPED and run["detail"]:  # of who stopped it
        detail = f"{run['detail']}; {detail}"
    log.info("run %s: attempt %d is over: %s: %s", name, run["attempt"], reason, detail)
    with ctx.store.write():
        number, code, killer = run["attempt"], driver.exit_code, driver.signal
        runs.end_attempt(ctx.store, name, number, exit_code=code, signal=killer, reason=reason)
        if reason is EndReason.STOPPED and run["wanted"] == "pause":
            ctx.move(name, Move.PAUSE, detail=detail)
        else:
            ctx.move(name, Move.END, reason=reason, detail=detail)
            if reason is EndReason.LOST and is_without_pool(ctx, run):
                excuse(ctx, run)
            restart(ctx, run, reason)
    if driver_lost_its_pool(run):
        put_away(ctx, run)
    ctx.pool_gone_since.pop(name, None)
    ctx.signalled.pop(attempt_dir(run).root, None)
    prune(ctx, runs.get(ctx.store, name))


def driver_lost_its_pool(run: Row) -> bool:
    end = end_of(last_facts(run_dir(run).journal, run["attempt"]))
    return end is not None and end.reason == EndReason.LOST


def is_without_pool(ctx: Context, run: Row) -> bool:
    """By what its driver said or what is seen."""
    life = life_of(ctx, run)
    return driver_lost_its_pool(run) or (life is not None and not life[1].is_up)


def put_away(ctx: Context, run: Row) -> None:
    """The next attempt would lose it too: a pool whose trainer or engine is gone takes seconds to end itself.

    Not when it has begun anew for others in the meantime, nor when others work in it: perhaps only this run lost it,
    and if not, they will all say so.
    """
    pool = ctx.pools.get(run["pool"])
    if pool is None or tenants_of(ctx, pool):
        return
    if pool.process.is_up and life_number(run) in (None, pool.number):
        stop_pool(ctx, pool)


def verdict(ctx: Context, run: Row, driver: ProcessState) -> tuple[EndReason, str]:
    """Why the attempt ended, and in words: what the driver said itself, else what was seen."""
    if end := end_of(last_facts(run_dir(run).journal, run["attempt"])):
        known = end.reason in EndReason.__members__.values()
        return EndReason(end.reason if known else "failed"), f"{end.detail}; {end.hint}" if end.hint else end.detail
    if run["wanted"] == "kill":
        return EndReason.KILLED, "killed on request"
    never_began = driver.phase == "vanished" and driver.pid is None
    if run["wanted"] and (driver.signal == signal.SIGTERM or never_began):
        return EndReason.STOPPED, "stopped before its first step"
    if words := pool_in_words(ctx, run):
        return pool_reason(ctx, run), words
    last = log_tail(attempt_dir(run).log)
    return EndReason.LOST, f"the driver {driver.in_words()}" + (f"; its log ends: {last}" if last else "")


def pool_reason(ctx: Context, run: Row) -> EndReason:
    """A pool that gave up before the run began made it fail; one that went away later, or was killed, lost it."""
    began = bool(last_facts(run_dir(run).journal, run["attempt"]))
    life = life_of(ctx, run)
    by_itself = life is not None and life[1].signal is None
    return EndReason.FAILED if by_itself and not began else EndReason.LOST


def pool_in_words(ctx: Context, run: Row) -> str:
    """How the run's pool went; "" while it is there."""
    life = life_of(ctx, run)
    if life is None:
        return f"pool {run['pool']} has lost its directory"
    attempt, process = life
    if process.is_up:
        return ""
    tail = log_tail(attempt.log, 5)
    return f"pool {run['pool']} {process.in_words()}" + (f"; its log ends:\n{tail}" if tail else "")


def restart(ctx: Context, run: Row, reason: EndReason) -> None:
    """Queue a failed run again when its spec wants that and it gets anywhere."""
    name = run["name"]
    if spec_of(run).resources.restart == "never" or reason not in MENDABLE or run["wanted"]:
        return
    futile = futile_attempts(ctx, name)
    if futile >= FUTILE:
        runs.set_fields(
            ctx.store, name, detail=f"{runs.get(ctx.store, name)['detail']}; {futile} attempts got no further"
        )
        return
    delay = ctx.patience.restart * 2**futile
    ctx.move(name, Move.RESUME, detail=f"restart after {reason}")
    runs.set_fields(ctx.store, name, waiting=f"restarts {delay:.0f} s after attempt {run['attempt']} was {reason}")
    ctx.not_before[name] = time.monotonic() + delay
