"""List the pools that are up, stop one, and list the nodes of the cluster."""

from lorad.daemon.access import find_pool, reader, sees
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import of_row, pool_view
from lorad.daemon.context import Context
from lorad.daemon.pool import devices_on
from lorad.daemon.pools import life
from lorad.errors import Conflict, NotFound
from lorad.records.pools import NodeStatus, Pool
from lorad.store import pools as rows
from lorad.store import runs


async def list_pools(ctx: Context, call: Call) -> list[Pool]:
    """List the pools that are up."""
    await life.refresh(ctx)
    up = [pool for pool in ctx.pools.values() if pool.process.is_up]
    return [pool_view(ctx, pool) for pool in up if sees(ctx, call.caller, pool.setup.owner)]


async def stop_pool(ctx: Context, call: Call) -> Pool:
    """End a pool that nobody uses. With `force`, the runs in it end with reason `lost` and can be resumed.

    Raises NotFound when it is not up, and Conflict while a run or a request uses it, or it serves.
    """
    name = call.request.match_info["pool"]
    force = bool(call.number("force", 0))
    pool = find_pool(ctx, call.caller, name)
    if pool is not None:
        life.look_at_process(ctx, pool)
    if pool is None or not pool.process.is_up:
        raise NotFound(f"no pool {name} is up", hint="`lorad pools` shows what there is.")
    if (tenants := runs.active_in(ctx.store, pool.id)) and not force:
        commands = "; ".join(f"lorad pause {run.name}" for run in tenants)
        hint = f"`{commands}` first. `lorad pools stop {name} --force` ends them at once; "
        hint += "`lorad resume` takes them up."
        raise Conflict(f"pool {name} is busy with {reader(ctx, call.caller).name_all(tenants)}", hint=hint)
    if pool.serves:
        names = sorted(pool.serves)
        hint = f"`lorad serve --stop {names[0]}` first."
        raise Conflict(f"pool {name} is kept up to serve {', '.join(names)}", hint=hint)
    if pool.guests and not force:
        raise Conflict(f"pool {name} answers a request", hint="Try again in a moment, or with --force.")
    life.stop_pool(ctx, pool)
    ctx.loop.poke()
    return pool_view(ctx, pool)


async def list_nodes(ctx: Context, call: Call) -> list[NodeStatus]:
    """List the nodes that config.yaml names or pools had, without the pools that the caller may not see."""
    nodes = {row.node: row for row in rows.nodes(ctx.store)}
    hosts = {node.host: node.devices for node in ctx.config.cluster.nodes} if ctx.config.cluster else {}
    grants = sorted(rows.grants(ctx.store), key=lambda grant: grant.since)
    last_grants = {name: grant for grant in grants for name in grant.nodes}
    who = reader(ctx, call.caller)
    statuses = []
    for name in sorted({*nodes, *hosts}):
        row = nodes.get(name)
        count = hosts.get(name, 0)
        if row is None:
            statuses.append(NodeStatus(name, cluster="static", count=count, free=count))
            continue
        users = [(pool, node) for pool in ctx.pools.values() for node in pool.nodes if node.node == name]
        in_use = {device for _, node in users for device in devices_on(node)}
        gpus = [device for device in row.devices if not device.endswith("/cpu")]
        count = max(count, len(gpus))
        grant = last_grants.get(name)
        says = f"{grant.state}: {grant.detail}" if grant and grant.detail else grant.state if grant else ""
        last = ctx.pools.get(grant.pool) if grant else None
        is_shown = who.sees_all if last is None else who.sees(last.setup.owner)
        status = of_row(
            NodeStatus,
            row,
            count=count,
            free=0 if row.state == "lost" else max(0, count - len(in_use & {*gpus})),
            agents=[f"{pool.id}@{pool.number}" for pool, _ in users if who.sees(pool.setup.owner)],
            bases=row.bases if who.sees_all else [],
            says=f"{says} ({grant.pool}@{grant.life})" if grant and is_shown else says,
        )
        statuses.append(status)
    return statuses
