"""The runs of a pool, what they take of it, and in which of its lives each of them is."""

import contextlib
from collections.abc import Iterable, Sequence

import msgspec

from lorad.box.paths import AttemptDir
from lorad.daemon.context import Context, request_of, spec_of
from lorad.daemon.pool import Pool
from lorad.daemon.pools.life import look_at_process
from lorad.daemon.process.processes import ProcessState, read_object
from lorad.daemon.queue.capacity import Need, Tenancy, capacity_of, need_of, promised
from lorad.errors import LoradError
from lorad.protocol.status import Capacity
from lorad.store import runs
from lorad.store.rows import RunRow


def tenants_of(ctx: Context, pool: Pool) -> list[RunRow]:
    """List the active runs that were placed in the pool, by priority and age."""
    return runs.active_in(ctx.store, pool.id)


def told(tenants: Sequence[RunRow]) -> str:
    """Name the runs: `run a`, `runs a, b and c`, `runs a, b and 6 others`."""
    names = [str(run.name) for run in tenants]
    if len(names) < 2:
        return f"run {', '.join(names)}"
    last = names[-1] if len(names) <= 4 else f"{len(names) - 2} others"
    return f"runs {', '.join(names[: len(names) - 1 if len(names) <= 4 else 2])} and {last}"


def need_of_run(run: RunRow, pool_dtype: str) -> Need:
    """Compute what a run takes of a pool. Raises StorageError where its files cannot be read."""
    facts = request_of(run).facts
    parameters, reference = facts.adapter_parameters, facts.reference_parameters
    return need_of(spec_of(run), parameters, pool_dtype, reference)


def room_in(pool: Pool, tenants: Iterable[RunRow]) -> Capacity:
    """Compute a pool's capacity with everything counted as taken that its runs take or will take."""
    return promised(capacity_of(pool.setup.server, pool.status), needs_of(pool, tenants), pool.status)


def needs_of(pool: Pool, tenants: Iterable[RunRow]) -> dict[Tenancy, Need]:
    """Compute what each run in the pool takes, except runs without files: only the pool's status counts
    those.
    """
    needs: dict[Tenancy, Need] = {}
    for run in tenants:
        with contextlib.suppress(LoradError, msgspec.MsgspecError):
            needs[run.name, run.attempt] = need_of_run(run, pool.setup.dtype)
    return needs


def life_of(ctx: Context, run: RunRow) -> tuple[AttemptDir, ProcessState] | None:
    """Find the pool process that the run's attempt began with, though the pool may have another by now; None:
    no such pool.

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
    number = read_object(run.attempt_dir.command).get("pool_attempt")
    return number if isinstance(number, int) else None
