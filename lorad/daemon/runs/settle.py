"""Find out how an attempt ended, once its driver is gone."""

import logging
import signal
from typing import NamedTuple

from lorad.box.paths import AttemptDir
from lorad.daemon.context import Context
from lorad.daemon.pools.life import stop_pool
from lorad.daemon.process.causes import in_words_of
from lorad.daemon.process.processes import ProcessState, log_end
from lorad.daemon.queue.restart import MENDABLE, excuse, pardon, queue_again, restart
from lorad.daemon.queue.tenants import life_number, life_of
from lorad.daemon.runs.end_clues import by_force, in_words, killed_for, was_restarted
from lorad.daemon.runs.take_in import end_of, is_taken_in, last_facts
from lorad.errors import IntegrityError
from lorad.protocol.journal import EndFact
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.rows import RunRow
from lorad.text import clauses

log = logging.getLogger("lorad.daemon")


class _Evidence(NamedTuple):
    """What is known of an attempt whose driver is gone, read once.

    driver: how the process ended.
    end: the driver's own record of its end, if it wrote one.
    began: the driver wrote more than its end.
    life: the attempt of the pool that the run was in, and what became of it; None where the pool lost its
        directory.
    """

    driver: ProcessState
    end: EndFact | None
    began: bool
    life: tuple[AttemptDir, ProcessState] | None

    @property
    def lost_its_pool(self) -> bool:
        """Check whether the driver recorded that it lost its pool."""
        return self.end is not None and self.end.reason == EndReason.LOST


def settle(ctx: Context, run: RunRow, driver: ProcessState) -> None:
    """Move a run whose driver is gone to where it belongs: ended, paused, or queued again."""
    name = run.name
    facts = last_facts(run.dir.journal, run.attempt)
    evidence = _Evidence(driver, end_of(facts), any(fact.kind != "end" for fact in facts), life_of(ctx, run))
    if (last := _last_word(ctx, run, evidence)) is None:
        return
    reason, detail = last
    run = runs.get(ctx.store, name)
    if reason is EndReason.STOPPED and run.detail:  # the reason for which it was stopped
        detail = f"{run.detail}; {detail}"
    if evidence.end is None and (trouble := ctx.loop.troubles.of(f"run {name}")):  # a disk that took nothing
        detail = clauses(detail, f"meanwhile {trouble}")
    log.info("run %s: attempt %d is over: %s: %s", name, run.attempt, reason, detail)
    with ctx.store.write():
        runs.end_attempt(
            ctx.store,
            name,
            run.attempt,
            exit_code=driver.exit_code,
            signal=driver.signal,
            reason=reason,
            detail=detail,
        )
        if reason is EndReason.STOPPED and run.wanted == "pause":
            runs.move(ctx.store, name, Move.PAUSE, detail=detail)
            queue_again(ctx, run)
        else:
            runs.move(ctx.store, name, Move.END, reason=reason, detail=detail)
            is_without_pool = evidence.lost_its_pool or (
                evidence.life is not None and not evidence.life[1].is_up
            )
            if was_restarted(run.attempt_dir):
                pardon(ctx, run, "the machine was restarted")
            elif reason is EndReason.LOST and is_without_pool:
                excuse(ctx, run)
            never_began = (
                is_without_pool and not evidence.began and (evidence.end is None or evidence.lost_its_pool)
            )
            restart(ctx, run, reason, evidence.life[0] if evidence.life else None, never_began=never_began)
    # A broken pool takes seconds to end itself, in which the next attempt would lose it too. A pool that has
    # started again since, or has other runs, stays: if it was lost to them as well, they will all report it.
    pool = ctx.pools.get(run.pool or "") if evidence.lost_its_pool else None
    is_idle = pool is not None and not runs.active_in(ctx.store, pool.id) and pool.process.is_up
    if pool is not None and is_idle and life_number(run) in (None, pool.number):
        stop_pool(ctx, pool)
    ctx.pools.gone_since.pop(name, None)
    ctx.storage.last_words.pop(name, None)
    ctx.storage.cuts.pop((name, run.attempt), None)
    ctx.processes.signalled.pop(run.attempt_dir.root, None)
    ctx.storage.unpruned.add(name)  # `prune_again` deletes what is not kept


def _last_word(ctx: Context, run: RunRow, evidence: _Evidence) -> tuple[EndReason, str] | None:
    """Return the verdict on the attempt once all of its journal is taken in; None before that, and in a home
    that was just moved. With a journal that cannot be trusted the run has failed.

    Raises OSError for one that cannot be read, unless the run is to be killed.
    """
    reason, detail = _verdict(run, evidence)
    try:
        return (reason, detail) if is_taken_in(ctx, run) and not ctx.store.is_moved else None
    except IntegrityError as error:
        runs.set_fields(ctx.store, run.name, wanted="stop")
        return EndReason.FAILED, error.message
    except OSError as error:
        if run.wanted != "kill":
            raise
        return reason, f"{detail}; its journal cannot be read: {error}"


def _verdict(run: RunRow, evidence: _Evidence) -> tuple[EndReason, str]:
    """Decide why the attempt ended, and say it in a sentence. What the driver recorded counts first."""
    driver = evidence.driver
    if evidence.end is not None:
        return by_its_word(run, evidence.end, evidence.life)
    if run.wanted == "kill":
        return EndReason.KILLED, "killed on request"
    never_began = driver.phase == "vanished" and driver.pid is None
    if run.wanted and (driver.signal == signal.SIGTERM or never_began):
        return EndReason.STOPPED, "stopped before its first step"
    if words := by_force(run.attempt_dir, driver):
        return (EndReason.STOPPED if run.wanted else EndReason.LOST), words
    if evidence.life is None:
        return EndReason.LOST, f"pool {run.pool} has lost its directory"
    if not evidence.life[1].is_up:
        attempt, process = evidence.life
        forced = by_force(attempt, process)
        is_silent = forced or process.signal == signal.SIGKILL  # it could not say why
        tail = "" if is_silent else log_end(attempt.log, 5)
        words = clauses(in_words(attempt, process, f"pool {run.pool}"), tail)
        is_lost = evidence.began or was_killed(process) or forced
        return (EndReason.LOST if is_lost else EndReason.FAILED), words
    words = in_words(run.attempt_dir, driver, "the driver")
    tail = "" if driver.signal == signal.SIGKILL else log_end(run.attempt_dir.log)
    return EndReason.LOST, clauses(words, tail)


def by_its_word(
    run: RunRow, end: EndFact, life: tuple[AttemptDir, ProcessState] | None
) -> tuple[EndReason, str]:
    """Repeat what the driver recorded of its end, and add how its pool ended and what can be done."""
    reason = EndReason(end.reason) if end.reason in EndReason.__members__.values() else EndReason.FAILED
    pool = ""
    if reason is EndReason.LOST and life is not None:
        pool = in_words(*life, f"pool {run.pool}") if life[1].is_over else killed_for(life[0])
    cause = in_words_of(end.detail) if reason in MENDABLE else None
    return reason, clauses(end.detail, pool, end.hint or (cause.advice if cause else ""))


def was_killed(process: ProcessState) -> bool:
    """Check whether a signal ended the process. One with only a start counts: its shim was killed as well."""
    return process.signal is not None or (process.phase == "vanished" and process.pid is not None)
