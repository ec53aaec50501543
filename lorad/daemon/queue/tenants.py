"""The runs of a pool, what they take of it, and in which of its lives each of them is."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from lorad.box.paths import AttemptDir
from lorad.daemon.context import Context, attempt_dir, request_of, spec_of
from lorad.daemon.pool import Pool, Room
from lorad.daemon.pools.life import look_at_process
from lorad.daemon.process.processes import ProcessState, read_object
from lorad.daemon.queue.capacity import Need, Tenancy, capacity_of, need_of, promised
from lorad.errors import LoradError
from lorad.protocol.status import Capacity
from lorad.states import ACTIVE
from lorad.store import runs
from lorad.store.rows import RunRow


def tenants_of(ctx: Context, pool: Pool) -> list[RunRow]:
    """List the active runs that were placed in the pool, by priority and age."""
    return [run for run in active_runs(ctx) if run.pool == pool.id]


def active_runs(ctx: Context) -> list[RunRow]:
    """List the active runs by priority and age; cached until the database changes, as a long queue asks
    often.
    """
    before, found = ctx.queue.active
    if (now := ctx.store.changes) is None or now != before:
        found = runs.in_states(ctx.store, *ACTIVE)
        ctx.queue.active = now, found
    return found


def told(tenants: Sequence[RunRow]) -> str:
    """Name the runs: `run a`, `runs a, b and c`, `runs a, b and 6 others`."""
    names = [str(run.name) for run in tenants]
    if len(names) < 2:
        return f"run {', '.join(names)}"
    last = names[-1] if len(names) <= 4 else f"{len(names) - 2} others"
    return f"runs {', '.join(names[: len(names) - 1 if len(names) <= 4 else 2])} and {last}"


def need_of_run(run: RunRow, pool_dtype: str) -> Need:
    """Raises StorageError where its files cannot be read."""
    facts = request_of(run).facts
    parameters, reference = facts.adapter_parameters, facts.reference_parameters
    return need_of(spec_of(run), parameters, pool_dtype, reference)


def room_in(ctx: Context, pool: Pool) -> Capacity:
    """Compute a pool's capacity with everything counted as taken that its runs take or will take."""
    tenants = tenants_of(ctx, pool)
    there = [(run.name, run.attempt) for run in tenants]
    if pool.room is None or pool.room.status is not pool.status or pool.room.tenants != there:
        capacity = promised(capacity_of(pool.setup.server, pool.status), needs_of(ctx, pool), pool.status)
        pool.room = Room(pool.status, there, capacity)
    return pool.room.capacity


def needs_of(ctx: Context, pool: Pool) -> dict[Tenancy, Need]:
    """Compute what each run in the pool takes, except runs without files: only the pool's status counts
    those.
    """
    needs: dict[Tenancy, Need] = {}
    for run in tenants_of(ctx, pool):
        with contextlib.suppress(LoradError, msgspec.MsgspecError):
            needs[run.name, run.attempt] = need_of_run(run, pool.setup.dtype)
    return needs


def life_of(ctx: Context, run: RunRow) -> tuple[AttemptDir, ProcessState] | None:
    """The pool process that the run's attempt began with, though the pool may have another by now; None: no
    such pool.

    Before its driver is started it is the newest one.
    """
    pool = ctx.pools.get(run.pool or "")
    if pool is None:
        return None
    number = life_number(run)
    if number in (None, pool.number):
        look_at_process(ctx, pool)
        return pool.attempt(), pool.process
    attempt = pool.attempt(number)
    return attempt, ctx.processes.inspect(attempt)


def life_number(run: RunRow) -> int | None:
    """Read which attempt the pool was at when the driver was started; None when that is not known."""
    number = read_object(attempt_dir(run).command).get("pool_attempt")
    return number if isinstance(number, int) else None
