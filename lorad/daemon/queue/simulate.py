"""Simulate the queue to foresee when each run starts, if all keep their pace and none comes, stops or fails.

Runs end after the steps that they have left; those that wait are then placed as a pass of placing would. The
order of the queue stays as it is. Nothing is changed, and the same state gives the same answer. Room is
looked for MOST_LOOKS times at most; when a run that is not placed by then starts is not known.
"""

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lorad.daemon.context import Context, spec_of
from lorad.daemon.pool import Pool
from lorad.daemon.queue.choose import Blocked, Hindrance, WaitingRun, choose
from lorad.daemon.queue.limits import quota_of
from lorad.daemon.queue.setups import Placement, candidates
from lorad.daemon.queue.snapshot import Snapshot
from lorad.errors import LoradError
from lorad.protocol.nodes import GrantStatus
from lorad.protocol.pool_setup import PoolSetup
from lorad.states import RunState
from lorad.store.foreseen.pace import Pace, pace_of_alike
from lorad.store.foreseen.pace import pace as pace_of
from lorad.store.rows import RunRow

MOST_LOOKS = 600
_NOWHERE = Path("/nonexistent")


class Foreseen(Struct, frozen=True):
    """When a queued run starts.

    at: Unix time.
    after: the run whose end makes room for it; "" where it waits for something else.
    """

    at: float
    after: str = ""


@dataclass
class _World:
    """The queue at one moment to come.

    at: Unix time.
    now: the snapshot by which runs are placed at that moment.
    waiting: runs in the order of the queue.
    ends: when runs at work end, as far as that is known.
    again: the runs among them that are then queued again, with the steps that they have made by then.
    wakes: when something else changes.
    last: the run that ended last.
    looks: how often room may still be looked for.
    paces: the paces that were looked up, by run; None where nobody has measured one.
    starts: what is foreseen of each run that starts.
    """

    ctx: Context
    at: float
    now: Snapshot
    waiting: list[RunRow]
    ends: dict[str, float] = field(default_factory=dict)
    again: dict[str, RunRow] = field(default_factory=dict)
    wakes: list[float] = field(default_factory=list)
    last: str = ""
    looks: int = 0
    paces: dict[str, Pace | None] = field(default_factory=dict)
    starts: dict[str, Foreseen] = field(default_factory=dict)


def simulate(ctx: Context, now: Snapshot, at: float) -> dict[str, Foreseen]:
    """Find when the runs at the head of the queue start, as far as can be known, from Unix time `at` on."""
    staying = [pool for pool in now.pools if now.tenants_of(pool) or pool.stop_asked is None]
    pools = [dataclasses.replace(pool, guests=0) for pool in staying]
    lasting = {name: occupied for name, occupied in now.occupied.items() if not occupied[1]}
    quiet = dataclasses.replace(now.with_runs(now.active, pools), occupied=lasting)
    world = _World(ctx, at, quiet, list(now.queued), looks=MOST_LOOKS)
    for run in now.active:
        _foresee_end(world, run)
    world.wakes += [run.restart_at for run in now.queued if run.restart_at is not None]
    if any(taken.is_idle for taken in now.taken.values()):
        world.wakes.append(at + ctx.config.queue.idle_timeout_wanted)
    _place_all(world)
    while world.waiting and world.looks > 0 and _advance(world):
        _place_all(world)
    return world.starts


def _foresee_end(world: _World, run: RunRow) -> None:
    """Note when a run at work ends: after its last step, or after its next one where it was asked to stop."""
    pace = _pace_of(world, run)
    if pace is None:
        return
    stops = run.state == RunState.STOPPING
    left = 1 if stops else max(0, run.steps - run.step)
    begins = world.at + pace.begin_seconds if run.state == RunState.STARTING else pace.last_at or world.at
    world.ends[run.name] = max(world.at, begins + left * pace.step_seconds)
    if stops and run.preempted:
        world.again[run.name] = replace(run, step=min(run.step + 1, run.steps), state=RunState.QUEUED)


def _pace_of(world: _World, run: RunRow) -> Pace | None:
    """Find how fast a run is, by its own steps or those of a run like it; None where a client decides."""
    if spec_of(run).algorithm.kind == "tinker":
        return None
    if run.name not in world.paces:
        store = world.ctx.store
        works = run.state in (RunState.RUNNING, RunState.STOPPING)
        measured = pace_of(store, run.name, run.attempt) if works else None
        if measured is None:
            measured = pace_of(store, run.name) or pace_of_alike(store, run.name, run.spec, run.base)
            measured = measured and replace(measured, last_at=0.0)
        world.paces[run.name] = measured
    return world.paces[run.name]


def _place_all(world: _World) -> None:
    """Place the runs for which there is room now, in the order of the queue; idle pools in their way have
    ended.

    Runs of lower priority that make room stop at their next step, and are queued again. Where a user has used
    up their device-hours, it is noted when they have some again.
    """
    claims: list[WaitingRun] = []
    for run in list(world.waiting):
        if world.looks <= 0:
            return
        if (run.restart_at or 0.0) > world.at:
            continue
        # one whose files cannot be read waits for these, and claims nothing
        with contextlib.suppress(KeyError, OSError, msgspec.MsgspecError, LoradError):
            choice = choose(world.ctx, world.now, run, claims, world.at)
            if isinstance(choice, Blocked) and Hindrance.LIMIT in choice.by:
                quota = quota_of(world.ctx, run.owner, run.owner_uid, world.at)
                if quota is not None and quota.again is not None and quota.again not in world.wakes:
                    world.wakes.append(quota.again)
                continue
            world.looks -= 1
            now = world.now
            if isinstance(choice, Blocked) and choice.idle:
                going = {pool.id for pool in choice.idle}
                world.now = now.with_runs(now.active, [pool for pool in now.pools if pool.id not in going])
                choice = choose(world.ctx, world.now, run, claims, world.at)
            if isinstance(choice, Placement):
                _start(world, run, choice.setup)
                continue
            for victim in choice.victims:
                pace = _pace_of(world, victim)
                ends = world.ends.get(victim.name)
                if pace is None or ends is None or victim.name in world.again:
                    continue
                world.ends[victim.name] = min(ends, world.at + pace.step_seconds)
                left = round((ends - world.ends[victim.name]) / max(pace.step_seconds, 1e-9))
                world.again[victim.name] = replace(victim, step=victim.steps - left, state=RunState.QUEUED)
                leaving = replace(victim, state=RunState.STOPPING, preempted=run.name)
                active = [leaving if other.name == victim.name else other for other in world.now.active]
                world.now = world.now.with_runs(active, world.now.pools)
            claims += choice.claims


def _start(world: _World, run: RunRow, setup: PoolSetup) -> None:
    """Let a run begin in the pool of its kind, or in a new one."""
    now = world.now
    pools = list(now.pools)
    pool = next((pool for pool in pools if pool.setup.key == setup.key and now.is_used(pool)), None)
    if pool is None:
        named = replace(setup, pool=f"new-{len(world.starts) + 1}")
        pool = Pool(named, _NOWHERE, grant=GrantStatus(state="granted") if setup.nodes else None)
        pools.append(pool)
    begun = replace(run, state=RunState.STARTING, pool=pool.id, attempt=run.attempt + 1, preempted=None)
    world.now = now.with_runs([*now.active, begun], pools)
    world.waiting = [other for other in world.waiting if other.name != run.name]
    world.starts.setdefault(run.name, Foreseen(world.at, world.last))
    _foresee_end(world, begun)


def _advance(world: _World) -> bool:
    """Move to the moment of the next change. False when there is none, as far as is known."""
    ending = min(world.ends, key=lambda name: (world.ends[name], name), default=None)
    wake = min((at for at in world.wakes if at > world.at), default=None)
    if wake is not None and (ending is None or wake < world.ends[ending]):
        world.at = wake
        world.last = ""
        free = {name: taken for name, taken in world.now.taken.items() if not taken.is_idle}
        world.now = dataclasses.replace(world.now, taken=free)
        return True
    if ending is None:
        return False
    world.at = max(world.at, world.ends.pop(ending))
    world.last = ending
    gone = next(run for run in world.now.active if run.name == ending)
    active = [run for run in world.now.active if run.name != ending]
    pools = list(world.now.pools)
    for place, pool in enumerate(pools):  # the run's own is then as after the run has left it
        status = pool.status
        if status is None or gone.pool != pool.id:
            continue
        loaded = [v for v in status.loaded if v in status.kept or v.rpartition("@")[0] != ending]
        capacity = status.capacity
        if capacity is not None:
            freed = sum(tenant.bytes for tenant in status.tenants if tenant.run == ending)
            fewer = capacity.versions - len(status.loaded) + len(loaded)
            used = max(0, capacity.memory_used - freed)
            capacity = replace(capacity, versions=max(0, fewer), memory_used=used)
        tenants = [tenant for tenant in status.tenants if tenant.run != ending]
        status = replace(status, tenants=tenants, loaded=loaded, capacity=capacity)
        pools[place] = dataclasses.replace(pool, status=status)
    world.now = world.now.with_runs(active, pools)
    if (again := world.again.pop(ending, None)) is not None:
        rank = -again.priority, again.created_at
        behind = [(-run.priority, run.created_at) > rank for run in world.waiting]
        world.waiting.insert(behind.index(True) if True in behind else len(behind), again)
        with contextlib.suppress(OSError, msgspec.MsgspecError, LoradError):
            places = {**world.now.candidates, ending: candidates(world.ctx, again)}
            world.now = dataclasses.replace(world.now, candidates=places)
    return True
