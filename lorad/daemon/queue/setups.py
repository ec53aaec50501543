"""Which pool a run asks for: on each group of devices, or of a cluster, to train there, and of which base to
be served.
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from lorad.backends.spread import check_spread, nodes_setup, places
from lorad.box.runtime import Why
from lorad.daemon.context import Context, Request, request_of, spec_of
from lorad.daemon.gpu.devices import Device, Shape, shape_of
from lorad.daemon.pool import names_of, setup_for
from lorad.daemon.pools.threads import threads_of
from lorad.errors import LoradError, SpecError
from lorad.protocol.nodes import NodesSetup
from lorad.protocol.pool_setup import PoolSetup
from lorad.spec.model import Spec
from lorad.store.rows import RunRow

Devices = tuple[Device, ...]
Asked = dict[Devices, tuple[PoolSetup, Why]]


def asked_of(ctx: Context, run: RunRow) -> Asked:
    """Find the smallest pool that suits the run on each group of devices, and on the cluster, and why it has
    that many threads.

    Raises SpecError, StorageError.
    """
    spec, request = spec_of(run), request_of(run)
    groups = _places(ctx, spec)
    setup = _setup_on(ctx, groups[0], run.owner_uid, spec, request)
    threads = threads_of(ctx, run, spec, request.parameters, {devices[0].kind for devices in groups})
    asked: Asked = {}
    for devices in groups:
        kind = devices[0].kind
        count, why = threads[kind]
        if isinstance(devices[0], Shape) and len(groups) > 1:
            setup = _setup_on(ctx, devices, run.owner_uid, spec, request)
        asked[devices] = replace(setup, threads=count, device=kind, devices=names_of(devices)), why
    return asked


def setup_of(ctx: Context, run: RunRow) -> PoolSetup:
    """Describe the pool of the run on the first devices that suit it, with one thread: as `PoolSetup.serves`
    compares them. Raises SpecError, StorageError.
    """
    spec, request = spec_of(run), request_of(run)
    return _setup_on(ctx, _places(ctx, spec)[0], run.owner_uid, spec, request)


def base_of(ctx: Context, run: RunRow) -> PoolSetup | None:
    """Describe the pool as `setup_of` does; None when no pool can serve versions of the run: its files are
    gone, or its backend or its GPUs.
    """
    try:
        return setup_of(ctx, run)
    except (OSError, msgspec.MsgspecError, LoradError):
        return None


def _setup_on(ctx: Context, devices: Devices, owner: int, spec: Spec, request: Request) -> PoolSetup:
    """Describe the pool of a run on these devices, with one thread."""
    setup = setup_for(
        spec,
        ctx.config,
        *devices,
        model_path=request.model_path,
        dtype=request.model_dtype,
        threads=1,
        facts=request.facts,
        cwd=request.cwd,
    )
    nodes = setup.nodes and replace(setup.nodes, memory=_memory_of_each(spec, setup.nodes, request))
    return replace(setup, owner=owner, nodes=nodes)


def _memory_of_each(spec: Spec, nodes: NodesSetup, request: Request) -> int:
    """Return the bytes that each GPU of the nodes must have; 0 where that is not known: those of nodes for
    servers alone hold something else, and a run that may be on this machine was measured for that.
    """
    needed, count = request.facts.memory_needed, nodes.nodes * nodes.devices
    if not (needed and count) or nodes.rollout_nodes or spec.resources.where == "any":
        return 0
    return int(needed / spec.pool.memory_fraction / count)


def _places(ctx: Context, spec: Spec) -> list[Devices]:
    """List where the run may go: groups of devices of this machine, and last what it asks of the cluster.

    Raises SpecError.
    """
    devices, cluster = ctx.gpus.devices, ctx.config.cluster
    where = places(spec, cluster, devices[0].kind, len(devices))
    check_spread(spec, cluster, where)
    found = _groups(devices, spec) if "local" in where else []
    if "cluster" in where and cluster is not None:
        found.append((shape_of(nodes_setup(spec, cluster)),))
    return found


def _groups(devices: Sequence[Device], spec: Spec) -> list[Devices]:
    """List the groups of neighbouring devices that suit a run; on the CPU all ranks share one.

    Raises SpecError.
    """
    count = 1 if devices[0].is_cpu else spec.gpus
    if count > len(devices):
        raise SpecError(f"it needs {count} GPUs, this machine has {len(devices)}")
    return [tuple(devices[first : first + count]) for first in range(len(devices) - count + 1)]
