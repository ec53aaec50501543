"""Whether a run fits into a pool, computed before it is admitted. Pure.

A run takes engine versions (those that stay loaded for it, and the one being loaded), a slot of the trainer
and the memory of both. A pool reports what it has; until it answers, and where it reports nothing, the limits
that it is started with count. What a run will take counts from its placing: a burst of runs does not get the
same room twice.
"""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from lorad.protocol.pool_setup import ServerSetup
from lorad.protocol.status import Capacity, PoolStatus
from lorad.spec.model import Spec
from lorad.text import size as in_units

_SLOT_BYTES = 16  # a parameter of an adapter: weight, gradient and two moments of Adam, fp32
_FROZEN_BYTES = 4  # a parameter that is never trained: its weight, fp32
_NUMBER_BYTES = {"float32": 4}  # bytes a number in loaded versions; other dtypes have two
MAX_VERSIONS = 64  # an engine holds so many unless its pool reports otherwise
MAX_RANK = 512  # the builtin engine takes no more
_TEMPORARY = 2  # copies that an attestation loads beside its version, on engines apart; runs take turns

Tenancy = tuple[str, int]  # run, attempt


class Need(Struct, frozen=True):
    """What a run takes of a pool.

    memory: bytes of its slot and its versions; 0 when its size is not known.
    """

    versions: int
    rank: int
    memory: int = 0


class _Lack(Struct, frozen=True):
    """What a pool does not have for a run.

    says: what the pool has and what the run needs.
    remedy: what the run's owner can change.
    """

    says: str
    remedy: str


def need_of(spec: Spec, parameters: int, dtype: str, reference: int = 0) -> Need:
    """parameters: of the adapter, 0 when not known; reference: of the one that KL is measured against, whose
    slot has weights alone; dtype: of the pool."""
    versions = _kept(spec) + 1
    own = parameters * (_SLOT_BYTES + versions * _NUMBER_BYTES.get(dtype, 2))
    return Need(versions, spec.lora.rank, own + reference * _FROZEN_BYTES)


def _kept(spec: Spec) -> int:
    """Count the versions that stay loaded for a run: the current one, the one before, and `max_staleness`
    more.
    """
    return spec.rollout.max_staleness + 2


def capacity_of(server: ServerSetup | None, status: PoolStatus | None) -> Capacity:
    """Read a pool's capacity from its status, or take the defaults.

    Servers keep room for their attestations.
    """
    told = status.capacity if status else None
    rank = server.max_rank if server else MAX_RANK
    found = told or Capacity(MAX_VERSIONS, len(status.loaded) if status else 0, rank)
    return replace(found, max_versions=found.max_versions - _TEMPORARY) if server else found


def promised(capacity: Capacity, needs: Mapping[Tenancy, Need], status: PoolStatus | None) -> Capacity:
    """Count everything as taken that the runs placed in a pool will take of its `capacity`.

    needs: the needs of all these runs.

    The pool itself counts what is loaded. Runs without a slot come on top, and so does what runs with a slot
    have yet to load. Kept versions belong to no run; other versions that are only served are unloaded when
    room is needed.
    """
    opened = {(tenant.run, tenant.attempt) for tenant in status.tenants} if status else set()
    coming = [need for tenancy, need in needs.items() if tenancy not in opened]
    others = len(status.kept) if status else 0
    spare = len({*status.loaded} - {*status.kept} - _versions_of(status)) if status else 0
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


def _versions_of(status: PoolStatus) -> set[str]:
    """List the loaded versions that belong to runs with a slot."""
    here = {tenant.run for tenant in status.tenants}
    return {version for version in status.loaded if version.rpartition("@")[0] in here}


def lacking(capacity: Capacity, need: Need) -> _Lack | None:
    """Find what a run with `need` lacks; None when it fits.

    capacity: as `promised` computes it.
    """
    if need.rank > capacity.max_rank:
        return _Lack(
            f"takes adapters up to rank {capacity.max_rank}, this one has {need.rank}", "lower lora.rank"
        )
    remedy = "lower rollout.max_staleness or lora.rank"
    if need.versions > (left := max(0, capacity.max_versions - capacity.versions)):
        plural = "" if left == 1 else "s"
        return _Lack(f"has room for {left or 'no'} more version{plural}, it needs {need.versions}", remedy)
    left = max(0, capacity.memory - capacity.memory_used)
    if capacity.memory and need.memory > left:
        return _Lack(f"has {in_units(left)} left, it needs {in_units(need.memory)} for its adapter", remedy)
    return None


def impossible(capacity: Capacity, need: Need) -> str:
    """Say why a run would not even fit if nobody else were there; "" when it would."""
    lack = lacking(replace(capacity, versions=0, memory_used=0), need)
    return f"it can never run: an empty pool of its kind {lack.says}; {lack.remedy}" if lack else ""
