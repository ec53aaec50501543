"""The runs of a pool: what they take of it, whether another one fits, and with which pool process each began.

A run takes versions in the engine (some stay loaded for it, one is being loaded), a slot in the trainer and
the memory of both. A pool reports what it has; until it answers, and where it reports nothing, it has the
limits that it is started with. What a run will take counts from its placing on, so that a burst of runs does
not get the same room twice.
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
from lorad.protocol.preflight import SpecFacts
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

    versions: how many the engine has loaded for it at a time.
    rank: the rank of its adapter.
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
    return need_of(spec_of(run), request_of(run).facts, pool_dtype)


def need_of(spec: Spec, facts: SpecFacts, dtype: str) -> Need:
    """Compute what a run takes of a pool of this dtype.

    The adapter that KL is measured against has weights alone in its slot, and the critic has no versions.
    """
    versions = spec.rollout.max_staleness + 3  # the current, the one before, as many more, the next one
    own = facts.adapter_parameters * (_SLOT_BYTES + versions * _NUMBER_BYTES.get(dtype, 2))
    others = facts.reference_parameters * _FROZEN_BYTES + facts.critic_parameters * _SLOT_BYTES
    return Need(versions, spec.lora.max_rank, own + others)


def capacity_of(server: ServerSetup | None, status: PoolStatus | None) -> Capacity:
    """Read a pool's capacity from its status, or take the defaults. Servers keep room for attestations."""
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
    unowned = status.kept if status else []
    opened = {(tenant.run, tenant.attempt) for tenant in status.tenants} if status else set()
    at_work = {run for run, _ in opened}
    served = {v for v in status.loaded if v.rpartition("@")[0] not in at_work} if status else set()
    coming = [need for tenancy, need in needs.items() if tenancy not in opened]
    versions = capacity.versions - len(served - {*unowned}) + sum(need.versions for need in coming)
    used = capacity.memory_used + sum(need.memory for need in coming)
    versions = max(versions, len(unowned) + sum(need.versions for need in needs.values()))
    used = max(used, sum(need.memory for need in needs.values()))
    return replace(capacity, versions=versions, memory_used=used)


def lacking(capacity: Capacity, need: Need) -> _PoolLack | None:
    """Find what a run with `need` lacks of a `promised` capacity; None when it fits."""
    if need.rank > capacity.max_rank:
        says = f"takes adapters up to rank {capacity.max_rank}, this one has {need.rank}"
        return _PoolLack(says, "lower lora.rank")
    remedy = "lower rollout.max_staleness or lora.rank"
    if need.versions > (left := max(0, capacity.max_versions - capacity.versions)):
        plural = "" if left == 1 else "s"
        says = f"has room for {left or 'no'} more version{plural}, it needs {need.versions}"
        return _PoolLack(says, remedy)
    left = max(0, capacity.memory - capacity.memory_used)
    if capacity.memory and need.memory > left:
        says = f"has {in_units(left)} left, it needs {in_units(need.memory)} for its adapter"
        return _PoolLack(says, remedy)
    return None


def impossible(capacity: Capacity, need: Need) -> str:
    """Say why a run would not even fit if nobody else were there; "" when it would."""
    lack = lacking(replace(capacity, versions=0, memory_used=0), need)
    return f"it can never run: an empty pool of its kind {lack.says}; {lack.remedy}" if lack else ""


def room_in(pool: Pool, tenants: Iterable[RunRow]) -> Capacity:
    """Compute a pool's capacity with everything counted as taken that its runs take or will take."""
    return promised(capacity_of(pool.setup.server, pool.status), needs_of(pool, tenants), pool.status)


def needs_of(pool: Pool, tenants: Iterable[RunRow]) -> dict[_Tenancy, Need]:
    """Compute what each run in the pool takes; the pool's status alone counts runs whose files are gone."""
    needs: dict[_Tenancy, Need] = {}
    for run in tenants:
        with contextlib.suppress(LoradError, msgspec.MsgspecError):
            needs[run.name, run.attempt] = need_in(run, pool.setup.dtype)
    return needs


def life_of(ctx: Context, run: RunRow) -> tuple[AttemptDir, ProcessState] | None:
    """Find the pool process that the run's attempt began with, though the pool may have another by now.

    Before the driver is started it is the newest one. None where there is no such pool.
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
