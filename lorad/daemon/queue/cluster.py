"""The queue over a cluster. Of the runs that want it, only the first asks for nodes, and its pool waits for
them.

While it waits, no run behind it joins another pool there, idle pools give their nodes back, and then runs of
lower priority stop for it where preemption is on. When `cluster.patience` is over, it is queued again, and
the runs behind it have their turn.

Where a node with ranks was asked to end, the runs there stop after their step, and are queued again.
"""

import logging
import time
from collections.abc import Sequence

from lorad.daemon.context import Context, spec_of
from lorad.daemon.guarded import each, of_pool
from lorad.daemon.pool import Pool
from lorad.daemon.pools.life import stop_pool
from lorad.daemon.queue.place import starting, stop_for
from lorad.protocol.listener import user_name
from lorad.states import Move, RunState
from lorad.store import runs
from lorad.store.rows import RunRow

log = logging.getLogger("lorad.daemon")
SETTLE_SECONDS = 5.0  # in which a cluster grants what it has free


def keep_cluster(ctx: Context) -> None:
    """Say what runs wait for on the cluster, and make room for the one that has asked for nodes."""
    waiting = [pool for pool in ctx.pools.values() if pool.process.is_up and pool.is_waiting]
    since = ctx.queue.asked_since
    ctx.queue.asked_since = {pool.id: since.get(pool.id, time.monotonic()) for pool in waiting}
    long = time.monotonic() - SETTLE_SECONDS
    ctx.queue.lacking = frozenset(name for name, at in ctx.queue.asked_since.items() if at < long)
    up = [pool for pool in ctx.pools.values() if pool.process.is_up and pool.setup.nodes is not None]
    each(ctx, _say, up, of_pool)
    each(ctx, _help, waiting, of_pool)
    each(ctx, _take_off, [pool for pool in up if pool.leaves], of_pool)
    if ctx.users.shared:
        each(ctx, _refuse_strangers, [pool for pool in up if pool.nodes], of_pool)


def _say(ctx: Context, pool: Pool) -> None:
    """Tell the runs that start in the pool what it waits for."""
    for run in runs.active_in(ctx.store, pool.id):
        words = starting(pool, run.name)
        if run.state == RunState.STARTING and run.waiting != words:
            runs.set_fields(ctx.store, run.name, waiting=words)


def _help(ctx: Context, pool: Pool) -> None:
    """Make room for a pool that waits for nodes.

    When its runs have waited long enough they are queued again, where others wait for the cluster or they may
    be somewhere else as well.
    """
    cluster = ctx.config.cluster
    tenants = runs.active_in(ctx.store, pool.id)
    if not tenants or pool.stop_asked is not None or pool.id not in ctx.queue.lacking:
        return
    waited = time.monotonic() - ctx.queue.asked_since[pool.id]
    on_nodes = [other for other in ctx.pools.values() if other is not pool and other.nodes]
    others = [(other, runs.active_in(ctx.store, other.id)) for other in on_nodes]
    stopping = any(run.state == RunState.STOPPING for _, working in others for run in working)
    if stopping or any(other.is_leaving for other, _ in others):
        return
    if idle := [other for other, working in others if not (working or other.serves or other.guests)]:
        for unused in idle:
            stop_pool(ctx, unused)
    elif victims := _victims(ctx, pool, tenants, others):
        stop_for(ctx, tenants[0], victims)
    elif cluster is not None and waited > cluster.patience:
        if not ctx.queue.on_cluster and all(spec_of(run).resources.where != "any" for run in tenants):
            return
        why = f"{pool.where} were not granted in {cluster.patience:g} s"
        log.info("pool %s: %s", pool.id, why)
        with ctx.store.write():
            for run in tenants:
                if run.state == RunState.STARTING:
                    wish = {"wanted": "pause", "yielded": why}
                    runs.move(ctx.store, run.name, Move.STOP, detail=why, also=wish)
        ctx.queue.passed |= {run.name for run in tenants}
        ctx.loop.poke()


def _victims(
    ctx: Context, pool: Pool, tenants: Sequence[RunRow], others: Sequence[tuple[Pool, list[RunRow]]]
) -> list[RunRow]:
    """Choose runs of lower priority whose pools have as many nodes together as the pool asks for, the lowest
    and youngest first; [] where these are not enough.

    others: the other pools on nodes, with the runs at work in each.
    """
    if not ctx.config.queue.preemption or pool.setup.nodes is None:
        return []
    priority = max(run.priority for run in tenants)
    lacking = pool.setup.nodes.bundles

    def rank(other: tuple[Pool, list[RunRow]]) -> tuple[int, float]:
        _, working = other
        return max(run.priority for run in working), -min(run.created_at for run in working)

    chosen: list[RunRow] = []
    training = [(other, working) for other, working in others if working]
    for other, working in sorted(training, key=rank):
        if other.serves or other.guests:
            continue
        if all(run.priority < priority and spec_of(run).resources.preemptible for run in working):
            chosen += working
            lacking -= len(other.nodes)
        if lacking <= 0:
            return chosen
    return []


def _take_off(ctx: Context, pool: Pool, why: str = "") -> None:
    """Have the runs of a pool stop after their step and be queued again; stop a pool without runs.

    why: the reason; "" where its nodes were asked to end.
    """
    why = why or pool.leaves
    tenants = runs.active_in(ctx.store, pool.id)
    for run in tenants:
        if run.state != RunState.STOPPING:
            wish = {"wanted": "pause", "yielded": why}
            runs.move(ctx.store, run.name, Move.STOP, detail=why, also=wish)
    if not tenants:
        stop_pool(ctx, pool)


def _refuse_strangers(ctx: Context, pool: Pool) -> None:
    """Take runs off nodes whose agents are another user's; each ends at its next turn in the queue."""
    owner = pool.setup.owner
    strangers = {node.uid for node in pool.nodes} - {pool.setup.owner}
    if not strangers:
        return
    ctx.queue.strangers[owner] = min(strangers)
    _take_off(ctx, pool, f"the agents of the cluster are {user_name(min(strangers))}'s")
