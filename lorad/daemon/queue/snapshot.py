"""A snapshot of what a pass of placing decides by: the queue, the active runs, the pools and the devices.

It is taken once at the beginning of a pass. Where the pass begins a run or asks runs to make room, runs and
pools are taken anew (`with_runs_of`). What is on the devices does not change in a pass, as processes start
and end outside of it.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from lorad.box.config import Queue
from lorad.daemon.access import EVERYTHING, Reader, reader
from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import NodesShape, is_taken
from lorad.daemon.gpu.lock_notes import holder_of
from lorad.daemon.gpu.state import Neighbour, SetAside
from lorad.daemon.pool import Pool
from lorad.daemon.pools.life import look_at_process
from lorad.daemon.pools.watch_gpus import occupied
from lorad.daemon.process.users import Caller
from lorad.daemon.queue.device_holders import held_in_words
from lorad.daemon.queue.setups import Devices, Placement, candidates
from lorad.daemon.queue.shares import in_order
from lorad.daemon.queue.tenants import room_in
from lorad.protocol.pool_setup import PoolSetup
from lorad.protocol.status import Capacity
from lorad.states import ACTIVE
from lorad.store import runs
from lorad.store.rows import QueuedRow, RunRow

LOOKED_AT = 32  # runs at the head of the queue for which a pass looks for room, so that it stays short


class _Taken(NamedTuple):
    """A device that somebody else than a pool of this daemon has locked.

    words: who holds it.
    is_idle: its holder does nothing with it.
    """

    words: str
    is_idle: bool


@dataclass(frozen=True)
class Snapshot:
    """What a pass of placing decides by.

    limits: the settings of the queue.
    queued: the runs at the head of the queue, in the order of their turns.
    far_back: the runs behind them in the queue.
    candidates: the pools that each of the queued runs and the newcomer may have, or the error that says why
        they are not known.
    widest: for each group of devices and kind of pool, the widest server that any queued run asks for.
    devices: all devices of the machine.
    taken: devices that others have locked, by name.
    occupied: why nothing can be placed on a device though it is not locked, by name; the flag says that the
        next look may clear it.
    set_aside: devices that are not for runs now, by name.
    neighbours: who computes on devices beside runs that yield, by the device's name.
    pools: the pools, whose processes were looked at.
    active: the runs that work, by priority and age.
    tenants: the active runs in each pool that has any.
    room: the capacity of each pool with everything counted as taken that its runs take or will take.
    reader: finds what somebody may read of others, who asks for a pool or reads what a run waits for.
    on_cluster: queued runs that may go to the cluster.
    passed: queued runs that others pass on the cluster: it did not grant in time what they ask for.
    lacking: pools that wait for nodes of the cluster, and did not get them at once.
    """

    limits: Queue = field(default_factory=Queue)
    queued: Sequence[RunRow] = ()
    far_back: Sequence[QueuedRow] = ()
    candidates: Mapping[str, list[Placement] | Exception] = field(default_factory=dict)
    widest: Mapping[tuple[Devices, str], PoolSetup] = field(default_factory=dict)
    devices: Devices = ()
    taken: Mapping[str, _Taken] = field(default_factory=dict)
    occupied: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    set_aside: Mapping[str, SetAside] = field(default_factory=dict)
    neighbours: Mapping[str, Neighbour] = field(default_factory=dict)
    pools: Sequence[Pool] = ()
    active: Sequence[RunRow] = ()
    tenants: Mapping[str, list[RunRow]] = field(default_factory=dict)
    room: Mapping[str, Capacity] = field(default_factory=dict)
    reader: Callable[[Caller], Reader] = lambda _: EVERYTHING
    on_cluster: frozenset[str] = frozenset()
    passed: frozenset[str] = frozenset()
    lacking: frozenset[str] = frozenset()

    def tenants_of(self, pool: Pool) -> list[RunRow]:
        return self.tenants.get(pool.id, [])

    def is_used(self, pool: Pool) -> bool:
        """Check whether the pool is up, or will be because runs are placed in it."""
        return pool.process.is_up or pool.id in self.tenants

    def blockers(self, place: Placement, run: RunRow | None) -> list[Pool]:
        """List the pools in use that must end before a pool can start at this place with `run` in it; where
        such a pool is up already, list that.

        On a cluster it is the pool that waits for nodes, as only one waits at a time. Where its runs go
        first, no other pool is joined.
        """
        setup = place.setup
        if setup.nodes is None:
            return self.pools_on(place.devices)
        used = [pool for pool in self.pools if pool.setup.nodes is not None and self.is_used(pool)]
        waiting = [pool for pool in used if pool.is_waiting]
        same = [pool for pool in used if pool.setup.key == setup.key]
        first = []  # these get what the run could have
        for pool in waiting:
            priority = max((tenant.priority for tenant in self.tenants_of(pool)), default=None)
            if pool in same or run is None or priority is None:
                continue
            is_before = priority == run.priority and pool.id in self.lacking
            if priority > run.priority or is_before:
                first.append(pool)
        return first or same or waiting

    def pools_on(self, devices: Devices) -> list[Pool]:
        """List the pools in use that have one of these devices. A pool whose slots the CPU no longer has
        holds all of it.
        """
        names = {device.name for device in devices}
        of_machine = {device.name for device in self.devices}
        users = []
        for pool in self.pools:
            if pool.setup.nodes is not None:
                continue
            pool_names = {*pool.setup.names}
            is_stray = pool.setup.device == "cpu" and devices[0].is_cpu and not of_machine & pool_names
            if self.is_used(pool) and (is_stray or names & pool_names):
                users.append(pool)
        return users

    def with_runs_of(self, ctx: Context) -> "Snapshot":
        """Take the active runs and the pools anew."""
        return self.with_runs(runs.in_states(ctx.store, *ACTIVE), tuple(ctx.pools.values()))

    def with_runs(self, active: Sequence[RunRow], pools: Sequence[Pool]) -> "Snapshot":
        """Take these active runs and pools in place of its own."""
        tenants: dict[str, list[RunRow]] = {}
        for run in active:
            tenants.setdefault(run.pool or "", []).append(run)
        room = {pool.id: room_in(pool, tenants.get(pool.id, [])) for pool in pools}
        return replace(self, active=active, pools=pools, tenants=tenants, room=room)


def take_snapshot(ctx: Context, queue: Sequence[QueuedRow], newcomer: RunRow | None = None) -> Snapshot:
    """Look at everything that placing depends on.

    queue: all queued runs, by priority and age.
    newcomer: a run that the database does not have, which is taken to be queued last.
    """
    if newcomer is not None:
        new = QueuedRow(newcomer.name, newcomer.owner_uid, newcomer.priority, "", newcomer.owner)
        queue = sorted([*queue, new], key=lambda run: -run.priority)
    for pool in ctx.pools.values():
        with contextlib.suppress(OSError):  # else it stays as it was seen last: `watch_pools` reports it
            look_at_process(ctx, pool)
    now = Snapshot(limits=ctx.config.queue, devices=tuple(ctx.gpus.devices)).with_runs_of(ctx)
    if len({run.owner_uid for run in queue}) > 1:
        queue = in_order(ctx, queue, now.active)
    names = [run.name for run in queue[:LOOKED_AT]]
    head = runs.named(ctx.store, names)
    if newcomer is not None and newcomer.name in names:
        head = [run for run in head if run.name != newcomer.name]  # it may be about to replace a run
        head.insert(names.index(newcomer.name), newcomer)
    looked_at = head if newcomer is None or newcomer in head else [*head, newcomer]
    by_run: dict[str, list[Placement] | Exception] = {}
    widest: dict[tuple[Devices, str], PoolSetup] = {}
    on_cluster = set[str]()
    for run in looked_at:
        try:
            by_run[run.name] = places = candidates(ctx, run)
        except Exception as error:  # which is the trouble of this run alone, when its turn comes
            by_run[run.name] = error
            continue
        served = {(at.devices, at.setup.kind): at.setup for at in places if at.setup.server is not None}
        widest |= {key: setup.widened(widest.get(key, setup)) for key, setup in served.items()}
        if any(isinstance(place.devices[0], NodesShape) for place in places):
            on_cluster.add(run.name)
    ctx.queue.on_cluster = frozenset(on_cluster)
    if ctx.queue.on_cluster <= ctx.queue.passed:
        ctx.queue.passed = frozenset()  # all had their turn: it begins again
    taken = {}
    for device in now.devices:
        if not now.pools_on((device,)) and is_taken(device):
            note = holder_of(device)
            is_idle = note is not None and note.idle_since is not None
            taken[device.name] = _Taken(held_in_words(device, note), is_idle)
    return replace(
        now,
        queued=head,
        far_back=queue[LOOKED_AT:],
        candidates=by_run,
        widest=widest,
        taken=taken,
        occupied=occupied(ctx),
        set_aside=ctx.gpus.set_aside,
        neighbours=ctx.gpus.neighbours,
        reader=partial(reader, ctx),
        on_cluster=ctx.queue.on_cluster,
        passed=ctx.queue.passed,
        lacking=ctx.queue.lacking,
    )
