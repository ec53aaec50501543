"""Take in what the lives of pools were granted of a cluster. Each life writes it to a file of its own
(`GrantStatus`); the tables `nodes` and `grants` are an index of these files.
"""

import time
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from lorad.bounds import STATUS_BYTES
from lorad.box.paths import AttemptDir
from lorad.daemon.context import Context
from lorad.daemon.guarded import each, of_pool
from lorad.daemon.pool import Pool, devices_on, is_lost
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.processes import attempts_under
from lorad.errors import StorageError
from lorad.files import read_file
from lorad.protocol.nodes import GRANT, GrantStatus, NodesSetup
from lorad.store import events, pools, runs
from lorad.store.pools import GrantRow, NodeRow

_NAME = 253  # characters of a node's name
_DEVICES = 64  # devices of a node
_BASES = 32  # base models that are remembered of a node
_KINDS = {"asked": "grant_asked", "granted": "granted", "refused": "grant_lost", "lost": "grant_lost"}


def adopt_grants(ctx: Context) -> None:
    """Take in the grants that the database does not know, and those whose lives ended while no daemon ran."""
    states = {(row.pool, row.life): row.state for row in pools.grants(ctx.store)}

    def adopt(ctx: Context, pool: Pool) -> None:
        for life in attempts_under(pool.root):
            number = int(life.root.name)
            is_over = not pool.process.is_up or number != pool.number
            before = states.get((pool.id, number))
            if before is not None and not (is_over and before in ("asked", "granted")):
                continue
            if (status := _read(ctx, pool, life)) is not None:
                with ctx.store.write():
                    _put(ctx, pool, number, status, is_over=is_over)

    each(ctx, adopt, [pool for pool in ctx.pools.values() if pool.setup.nodes is not None], of_pool)


def watch_grants(ctx: Context) -> None:
    """Read what pools were granted by now, and write it down where that changed."""
    each(ctx, _watch, [pool for pool in ctx.pools.values() if pool.setup.nodes is not None], of_pool)


def _watch(ctx: Context, pool: Pool) -> None:
    """Take in the grant of a pool's newest life, or its end. Raises StorageError as `_read` does."""
    number, before, _ = pool.noted
    if not pool.process.is_up:
        if before is not None:
            last = _read(ctx, pool, pool.attempt(number)) or before
            pool.noted = 0, None, False
            with ctx.store.write():
                _put(ctx, pool, number, last, is_over=True)
                if last.state != before.state:
                    _tell(ctx, pool, last)
            ctx.loop.poke()
        return
    number = pool.number
    status = _read(ctx, pool, pool.attempt())
    is_ready = pool.status is not None
    if status is None or (number, status, is_ready) == pool.noted:
        return
    pool.noted = (number, status, is_ready)
    pool.grant = status
    with ctx.store.write():
        rows = {(row.pool, row.life): row for row in pools.grants(ctx.store)}
        written = rows.get((pool.id, number))
        if written is None or written.state != status.state:
            _tell(ctx, pool, status)
        _put(ctx, pool, number, status, is_ready=is_ready)
        had = written.nodes if written is not None and status.state == "granted" else []
        for name in sorted({*had} - {node.node for node in status.nodes}):
            for row in pools.nodes(ctx.store):
                if row.node == name:
                    pools.put_cluster_row(ctx.store, replace(row, state="lost"))
            pools.end_leases(ctx.store, pool.id, name)  # it had servers alone, and the pool works without it
            how = status.words or f"{name}: another one is in its place"
            _add_event(ctx, pool, "node_lost", {"node": name, "how": how})
    ctx.loop.poke()


def _read(ctx: Context, pool: Pool, life: AttemptDir) -> GrantStatus | None:
    """Read what a life was granted; None where it has not written it. Raises StorageError for a bad file."""
    path = life.work / GRANT
    try:
        with as_user(ctx.user(pool.setup.owner)):
            status = msgspec.json.decode(read_file(path, STATUS_BYTES, links=False), type=GrantStatus)
        setup = pool.setup.nodes  # the file may be a user's own, and say anything
        names = [node.node for node in status.nodes]
        assert setup is not None
        asked_for = {host.name for host in setup.hosts} or {*names}
        named = [*names, *status.leaving]
        if len(names) > setup.bundles or len({*names}) < len(names) or not asked_for.issuperset(named):
            raise ValueError("it names nodes that were not asked for")
        if any(len(name) > _NAME or not name.isprintable() for name in named):
            raise ValueError("it names nodes as nobody does")
        if any(len(node.devices) > _DEVICES for node in status.nodes):
            raise ValueError("it names more devices than a node has")
        return status
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # msgspec raises ValueErrors
        raise StorageError(f"{path} cannot be read: {error}", hint="Nothing is placed by it.") from None


def _put(
    ctx: Context, pool: Pool, life: int, status: GrantStatus, *, is_over: bool = False, is_ready: bool = False
) -> None:
    setup = pool.setup.nodes
    assert setup is not None
    state = "over" if is_over and status.state in ("asked", "granted") else status.state
    row = GrantRow(
        pool=pool.id,
        life=life,
        kind=setup.kind,
        external=f"{setup.group}@{life}" if setup.kind == "ray" else "",
        state=state,
        since=status.since,
        nodes=[node.node for node in status.nodes],
        detail=status.words,
    )
    pools.put_cluster_row(ctx.store, row)
    is_held = not is_over and state in ("granted", "lost")  # it may go on without the lost node
    rows = {row.node: row for row in pools.nodes(ctx.store)}
    elsewhere = {node.node for other in ctx.pools.values() if other is not pool for node in other.nodes}
    for node in status.nodes:
        base = [pool.setup.model_path] if is_ready else []
        before = rows[node.node].bases if node.node in rows else []
        gone = is_lost(status, node)
        now = "lost" if gone else "granted" if is_held or node.node in elsewhere else "free"
        node_row = NodeRow(
            node=node.node,
            cluster="static" if setup.kind == "static" else setup.address,
            address=node.ip,
            boot_id=node.boot_id,
            uid=node.uid,
            devices=devices_on(node),
            bases=[*(name for name in before if name not in base), *base][-_BASES:],
            seen_at=time.time(),
            state=now,
        )
        pools.put_cluster_row(ctx.store, node_row)
        for device in devices_on(node) if is_held and not gone else ():
            pools.lease(ctx.store, pool.id, device, "pool", node.node)


def _tell(ctx: Context, pool: Pool, status: GrantStatus) -> None:
    """Add the events of a grant that changed its state."""
    for node in status.nodes:
        if is_lost(status, node):
            _add_event(ctx, pool, "node_lost", {"node": node.node, "how": status.words})
    nodes = [node.node for node in status.nodes]
    _add_event(ctx, pool, _KINDS[status.state], {"nodes": nodes, "detail": status.words})


def _add_event(ctx: Context, pool: Pool, kind: str, facts: dict[str, object]) -> None:
    """Add an event of each run in the pool; of none where it has none."""
    names: Iterable[str | None] = [run.name for run in runs.active_in(ctx.store, pool.id)] or [None]
    for name in names:
        events.append(ctx.store, name, kind, {"pool": pool.id, **facts})


def with_likely_first(ctx: Context, pool: Pool) -> NodesSetup | None:
    """Put the nodes first that are free and were used with the pool's base, as they have it in memory or on
    disk. On a cluster of Ray, Ray knows which are free. None for a pool of this machine.
    """
    setup = pool.setup.nodes
    if setup is None:
        return None
    used = [row for row in pools.nodes(ctx.store) if pool.setup.model_path in row.bases]
    if setup.kind == "ray":
        return replace(setup, warm=tuple(row.address for row in used if row.cluster == setup.address))
    warm = {row.node for row in used}
    taken = {node.node for other in ctx.pools.values() if other is not pool for node in other.nodes}
    hosts = sorted(setup.hosts, key=lambda host: (host.name in taken, host.name not in warm))
    return replace(setup, hosts=tuple(hosts))
