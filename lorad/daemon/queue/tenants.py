"""The runs of a pool: what they take of it, whether another one fits, and with which pool process each began.

A run takes engine versions (those that stay loaded for it, and the one being loaded), a slot of the trainer
and the memory of both. A pool reports what it has; until it answers, and where it reports nothing, the limits
that it is started with count. What a run will take counts from its placing: a burst of runs does not get the
same room twice.
"""

import contextlib
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lorad.box.paths import AttemptDir
from lorad.daemon.context import Context, request_of, spec_of
from lorad.daemon.pool import Pool
from lorad.daemon.pools.life import look_at_process
from lorad.daemon.process.processes import ProcessState, read_object
from lorad.errors import LoradError
from lorad.protocol.pool_setup import ServerSetup
from lorad.protocol.status import Capacity, PoolStatus
from lorad.spec.model import Spec
from lorad.store.rows import RunRow
from lorad.text import size as in_units

_SLOT_BYTES = 16  # a parameter of an adapter: weight, gradient and two moments of Adam, fp32
_FROZEN_BYTES = 4  # a parameter that is never trained: its weight, fp32
_NUMBER_BYTES = {"float32": 4}  # bytes a number in loaded versions; other dtypes have two
MAX_VERSIONS = 64  # an engine holds so many unless its pool reports otherwise
MAX_RANK = 512  # the builtin engine takes no more
_TEMPORARY = 2  # copies that an attestation loads beside its version, on engines apart; runs take turns

_Tenancy = tuple[str, int]  # run, attempt


class Need(Struct, frozen=True):
    """What a run takes of a pool.

    memory: bytes of its slot and its versions; 0 when its size is not known.
    """

    versions: int
    rank: int
    memory: int = 0


class _PoolLack(Struct, frozen=True):
    """What a pool does not have for a run.

    says: what the pool has and what the run needs.
    remedy: what the run's owner can change.
    """

    says: str
    remedy: str


def need_in(run: RunRow, pool_dtype: str) -> Need:
    """Compute what a run takes of a pool. Raises StorageError where its files cannot be read."""
    facts = request_of(run).facts
    return need_of(
        spec_of(run),
        facts.adapter_parameters,
        pool_dtype,
        facts.reference_parameters,
        facts.critic_parameters,
    )


def need_of(spec: Spec, parameters: int, dtype: str, reference: int = 0, critic: int = 0) -> Need:
    """Compute what a run takes of a pool of this dtype.

    parameters: how many the adapter has, 0 when not known.
    reference: parameters of the adapter that KL is measured against, whose slot has weights alone.
    critic: parameters of the critic, of which there are no versions.
    """
    versions = spec.rollout.max_staleness + 3  # the current, the one before, as many more, the next one
    own = parameters * (_SLOT_BYTES + versions * _NUMBER_BYTES.get(dtype, 2))
    return Need(versions, spec.lora.max_rank, own + reference * _FROZEN_BYTES + critic * _SLOT_BYTES)


def capacity_of(server: ServerSetup | None, status: PoolStatus | None) -> Capacity:
    """Read a pool's capacity from its status, or take the defaults.

    Servers keep room for their attestations.
    """
    capacity = status.capacity if status else None
    if capacity is None:
        rank = server.max_rank if server else MAX_RANK
        capacity = Capacity(MAX_VERSIONS, len(status.loaded) if status else 0, rank)
    return replace(capacity, max_versions=capacity.max_versions - _TEMPORARY) if server else capacity


def promised(capacity: Capacity, needs: Mapping[_Tenancy, Need], status: PoolStatus | None) -> Capacity:
    """Count everything as taken that the runs placed in a pool will take of its `capacity`.

    needs: the needs of all these runs.

    The pool itself counts what is loaded. Runs without a slot come on top, and so does what runs with a slot
    have yet to load. Kept versions belong to no run; other versions that are only served are unloaded when
    room is needed.
    """
    opened = {(tenant.run, tenant.attempt) for tenant in status.tenants} if status else set()
    coming = [need for tenancy, need in needs.items() if tenancy not in opened]
    others = len(status.kept) if status else 0
    at_work = {run for run, _ in opened}
    served = {v for v in status.loaded if v.rpartition("@")[0] not in at_work} if status else set()
    spare = len(served - {*status.kept}) if status else 0
    return replace(
        capacity,
        versions=max(
            capacity.versions - spare + sum(need.versions for need in coming),
            others + sum(need.versions for need in needs.values()),
        ),
        memory_used=max(
            capacity.memory_used + sum(need.memory for need in coming),
            sum(need.memory for need in needs.values()),
        ),
    )


def lacking(capacity: Capacity, need: Need) -> _PoolLack | None:
    """Find what a run with `need` lacks; None when it fits.

    capacity: as `promised` computes it.
    """
    if need.rank > capacity.max_rank:
        return _PoolLack(
            f"takes adapters up to rank {capacity.max_rank}, this one has {need.rank}", "lower lora.rank"
        )
    remedy = "lower rollout.max_staleness or lora.rank"
    if need.versions > (left := max(0, capacity.max_versions - capacity.versions)):
        plural = "" if left == 1 else "s"
        return _PoolLack(
            f"has room for {left or 'no'} more version{plural}, it needs {need.versions}", remedy
        )
    left = max(0, capacity.memory - capacity.memory_used)
    if capacity.memory and need.memory > left:
        return _PoolLack(
            f"has {in_units(left)} left, it needs {in_units(need.memory)} for its adapter", remedy
        )
    return None


def impossible(capacity: Capacity, need: Need) -> str:
    """Say why a run would not even fit if nobody else were there; "" when it would."""
    lack = lacking(replace(capacity, versions=0, memory_used=0), need)
    return f"it can never run: an empty pool of its kind {lack.says}; {lack.remedy}" if lack else ""


def room_in(pool: Pool, tenants: Iterable[RunRow]) -> Capacity:
    """Compute a pool's capacity with everything counted as taken that its runs take or will take."""
    return promised(capacity_of(pool.setup.server, pool.status), needs_of(pool, tenants), pool.status)


def needs_of(pool: Pool, tenants: Iterable[RunRow]) -> dict[_Tenancy, Need]:
    """Compute what each run in the pool takes, except runs without files: only the pool's status counts
    those.
    """
    needs: dict[_Tenancy, Need] = {}
    for run in tenants:
        with contextlib.suppress(LoradError, msgspec.MsgspecError):
            needs[run.name, run.attempt] = need_in(run, pool.setup.dtype)
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


def has_joined(run: RunRow) -> bool:
    """Check whether the pool was up, for others, when the driver was started."""
    return read_object(run.attempt_dir.command).get("joins") is True
