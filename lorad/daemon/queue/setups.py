"""Describe the pools that a run may have: on each group of devices or on a cluster to train there, and of
which base for its versions to be served.
"""

from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from lorad.backends.spread import check_spread, nodes_setup, places
from lorad.box.runtime import Decision
from lorad.daemon.context import Context, Request, request_of, spec_of
from lorad.daemon.gpu.devices import Device, NodesShape, shape_of
from lorad.daemon.pool import names_of, setup_for
from lorad.daemon.pools.threads import threads_of
from lorad.errors import LoradError, SpecError
from lorad.protocol.pool_setup import PoolSetup
from lorad.spec.model import Spec
from lorad.store.rows import RunRow

Devices = tuple[Device, ...]


class Placement(NamedTuple):
    """A pool that a run or a request may have.

    devices: a group of this machine's, or what a cluster is asked for.
    setup: what the pool is to be like.
    why: the reason for its number of threads.
    """

    devices: Devices
    setup: PoolSetup
    why: Decision


def candidates(ctx: Context, run: RunRow) -> list[Placement]:
    """Find the smallest pool for the run on each group of devices and the cluster. Raises as `setup_of`."""
    spec = spec_of(run)
    request = request_of(run)
    groups = _places(ctx, spec)
    setup = _setup_on(ctx, groups[0], run.owner_uid, spec, request)
    threads = threads_of(ctx, run, spec, request.parameters, {devices[0].kind for devices in groups})
    placements = []
    for devices in groups:
        kind = devices[0].kind
        count, why = threads[kind]
        if isinstance(devices[0], NodesShape) and len(groups) > 1:
            setup = _setup_on(ctx, devices, run.owner_uid, spec, request)
        fitting = replace(setup, threads=count, device=kind, devices=names_of(devices))
        placements.append(Placement(devices, fitting, why))
    return placements


def setup_of(ctx: Context, run: RunRow) -> PoolSetup:
    """Describe the pool of the run on the first devices that suit it, with one thread: as `PoolSetup.serves`
    compares them. Raises SpecError, StorageError.
    """
    spec = spec_of(run)
    return _setup_on(ctx, _places(ctx, spec)[0], run.owner_uid, spec, request_of(run))


def base_of(ctx: Context, run: RunRow) -> PoolSetup | None:
    """Describe the pool as `setup_of` does; None where its files, its backend or its GPUs are gone."""
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
    nodes = setup.nodes
    if nodes is not None:
        # How much memory each GPU must have is not known where some nodes have servers alone, nor of a run
        # that may be on this machine, for which it was measured.
        needed = request.facts.memory_needed / spec.pool.memory_fraction
        is_unknown = nodes.rollout_nodes or spec.resources.where == "any"
        count = nodes.nodes * nodes.devices
        nodes = replace(nodes, memory=0 if is_unknown or not count else int(needed / count))
    return replace(setup, owner=owner, nodes=nodes)


def _places(ctx: Context, spec: Spec) -> list[Devices]:
    """List where the run may go: groups of neighbouring devices of this machine, and last the nodes of a
    cluster.

    All ranks share a CPU, or the slot of it that servers leave them. Raises SpecError.
    """
    devices = ctx.gpus.devices
    cluster = ctx.config.cluster
    where = places(spec, cluster, devices[0].kind, len(devices))
    check_spread(spec, cluster, where)
    groups: list[Devices] = []
    if "local" in where:
        count = 1 + spec.server_devices if devices[0].is_cpu else spec.gpus
        if count > len(devices):
            what = "slots of the CPU" if devices[0].is_cpu else "GPUs"
            raise SpecError(f"it needs {count} {what}, this machine has {len(devices)}")
        groups = [tuple(devices[first : first + count]) for first in range(len(devices) - count + 1)]
    if "cluster" in where and cluster is not None:
        groups.append((shape_of(nodes_setup(spec, cluster)),))
    return groups
