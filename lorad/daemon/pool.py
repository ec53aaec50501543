"""A pool as the daemon sees it: its `pool.json`, its process, and its last status."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from lorad.backends.setup import is_fused, ranks_setup, server_setup
from lorad.backends.spread import nodes_setup
from lorad.box.config import Backend, Config
from lorad.box.paths import AttemptDir
from lorad.daemon.gpu.devices import Device, NodesShape, shape_of
from lorad.daemon.process.processes import ProcessState, attempts_under
from lorad.limits.arguments import RANKED
from lorad.protocol.nodes import GrantedNode, GrantStatus
from lorad.protocol.pool_setup import Dtype, Mode, PoolSetup
from lorad.protocol.preflight import BaseFacts
from lorad.protocol.status import PoolStatus
from lorad.servers.table import SERVERS
from lorad.spec.model import Spec


class KeepRefusal(NamedTuple):
    """Says how often a pool refused to keep a version, and the monotonic time at which it is asked again."""

    times: int
    not_before: float


@dataclass
class Pool:
    """One base model on its devices, for many runs.

    process: the process of its newest attempt.
    status: its last answer; None until it has answered.
    grant: what its process was granted of a cluster, as far as it said.
    noted: the life, its grant and whether it was ready then, as `pools/grants.py` wrote it down last.
    polled_at: when it last answered, or took too long.
    asked_at: when the newest question was asked.
    is_slow: its last answer took long, or it gave none.
    clears_up_until: the monotonic time until which others wait for what its last life left behind, which may
        still have its devices, to end.
    guests: how many requests use it that are no runs.
    serves: runs for which it is kept up, see `serving/keep_up.py`.
    held_at: the status and the changes that `serving/keep_loaded.py` saw last.
    checked: when its directory was last checked, and what was wrong with it.
    refusals: the versions (`run@version`) that it did not keep.
    warned: `run@version` -> the warning that its run had about that.
    """

    setup: PoolSetup
    root: Path
    process: ProcessState = field(default_factory=lambda: ProcessState("absent"))
    status: PoolStatus | None = None
    grant: GrantStatus | None = None
    noted: tuple[int, GrantStatus | None, bool] = (0, None, False)
    polled_at: float = 0.0
    asked_at: float = 0.0
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_slow: bool = False
    clears_up_until: float = 0.0
    guests: int = 0
    serves: set[str] = field(default_factory=set)
    used_at: float = field(default_factory=time.monotonic)
    stop_asked: float | None = None
    held_at: tuple[float, int] = (0.0, 0)
    is_holding: bool = False
    checked: tuple[float, str] = (float("-inf"), "")
    refusals: dict[str, KeepRefusal] = field(default_factory=dict)
    warned: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.setup.pool

    @property
    def work(self) -> Path:
        """Return the directory that its process writes to; another user's pool has one of its own."""
        directory = self.root / "work"
        return directory if directory.is_dir() else self.root

    @property
    def number(self) -> int:
        """Return the number of the newest attempt; 0 when there is none."""
        return max((int(attempt.root.name) for attempt in attempts_under(self.root)), default=0)

    def attempt(self, number: int | None = None) -> AttemptDir:
        return AttemptDir(self.root / "attempts" / f"{self.number if number is None else number:04d}")

    @property
    def state(self) -> str:
        """Return `starting`, `ready`, `stopping` or `ended`."""
        if not self.process.is_up:
            return "ended"
        return "stopping" if self.stop_asked is not None else "starting" if self.status is None else "ready"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the devices of this machine that it holds; none on a cluster."""
        return () if self.setup.nodes else self.setup.names

    @property
    def nodes(self) -> tuple[GrantedNode, ...]:
        """Return the nodes that it has now. A node that has servers alone may leave, and the pool stays."""
        if self.grant is None or self.grant.state not in ("granted", "lost"):
            return ()
        return tuple(node for node in self.grant.nodes if not is_lost(self.grant, node))

    @property
    def is_waiting(self) -> bool:
        """Check whether it waits for nodes, or will once it is started."""
        return self.setup.nodes is not None and (self.grant is None or self.grant.state == "asked")

    @property
    def leaves(self) -> str:
        """Say which of its nodes were asked to end; "" where none was."""
        names = self.grant.leaving if self.grant is not None and self.process.is_up else ()
        return f"{', '.join(names)} of the cluster: asked to end" if names else ""

    @property
    def where(self) -> str:
        """Name what it is on: devices of this machine, nodes, or what it asks a cluster for."""
        if self.setup.nodes is None:
            return ", ".join(self.setup.names)
        return ", ".join(node.node for node in self.nodes) or shape_of(self.setup.nodes).name

    @property
    def waits_for(self) -> str:
        """Say what it asks a cluster for, and what is lacking; "" where it asks for nothing."""
        if not self.is_waiting:
            return ""
        lacking = f": {self.grant.words}" if self.grant is not None and self.grant.words else ""
        return f"waits for {self.where} of the cluster{lacking}"

    @property
    def holds(self) -> tuple[str, ...]:
        """Return the names of all devices that it has, those of nodes as in `h1/cuda:3`."""
        return tuple(name for node in self.nodes for name in devices_on(node)) or self.names

    @property
    def is_leaving(self) -> bool:
        """Check whether its devices become free soon."""
        return time.monotonic() < self.clears_up_until or (self.process.is_up and self.stop_asked is not None)

    @property
    def idle_seconds(self) -> float:
        """Return the seconds since the last use of any kind."""
        own = time.monotonic() - self.used_at
        return 0.0 if self.guests else min(own, self.status.idle_seconds) if self.status else own


def setup_for(
    spec: Spec,
    config: Config,
    *devices: Device,
    model_path: str,
    dtype: str,
    threads: int,
    facts: BaseFacts | None = None,
    cwd: str = "/",
) -> PoolSetup:
    """Make the setup of the pool that a run needs on these devices, without an id.

    dtype: the checkpoint's.
    facts: what the preflight found; it matters to servers and teachers only.
    cwd: where relative paths of the spec start; it matters to servers only.

    Raises SpecError when config.yaml lacks the backend, ValidationError when the facts are too few.
    """
    trainer = config.backends.get(spec.trainer.backend, Backend())
    engine = config.backends.get(spec.rollout.backend, Backend())
    on_cpu = devices[0].is_cpu
    on_nodes = isinstance(devices[0], NodesShape)
    is_slot = devices[0].name != devices[0].kind and not on_nodes
    slots = len(devices) / config.devices.cpu_slots if is_slot else 1  # of the CPU that the pool has
    # on a GPU the checkpoint's own, with bfloat16 in place of whatever is not float32
    usual: Dtype = "float32" if on_cpu or dtype == "float32" else "bfloat16"
    mode: Mode
    if spec.pool.mode != "auto":
        mode = spec.pool.mode
    elif spec.resources.rollout_nodes or spec.server_devices:
        mode = "split"
    elif spec.rollout.backend not in SERVERS:
        mode = "fused" if is_fused(spec, trainer) and not on_nodes else "resident"
    else:  # a server of the user's stays as it is, as others may use it; the builtin engine cannot sleep
        mode = "resident" if on_cpu or spec.rollout.urls else "timesliced"
    return PoolSetup(
        pool="",
        model=spec.model.path,
        model_path=model_path,
        dtype=usual if spec.model.dtype == "auto" else spec.model.dtype,
        quantize=spec.model.quantize,
        trainer=spec.trainer.backend,
        engine=spec.rollout.backend,
        mode=mode,
        teacher=spec.algorithm.teacher or "",
        teacher_path=facts.teacher_path if facts else "",
        threads=threads,
        device=devices[0].kind,
        devices=names_of(devices),
        rollout_devices=0 if on_nodes else spec.server_devices,
        deterministic=on_cpu if spec.deterministic is None else spec.deterministic,
        memory_fraction=spec.pool.memory_fraction * slots,
        trainer_class=trainer.trainer,
        engine_class=engine.engine,
        pythonpath=engine.pythonpath or trainer.pythonpath,
        server=server_setup(spec, engine, facts or BaseFacts(), Path(cwd))
        if spec.rollout.backend in SERVERS
        else None,
        ranks=ranks_setup(spec, trainer) if spec.trainer.backend in RANKED else None,
        nodes=nodes_setup(spec, config.cluster) if on_nodes and config.cluster else None,
        hang=config.supervision.hang,
    )


def is_lost(status: GrantStatus, node: GrantedNode) -> bool:
    """Check whether a grant was lost with this node."""
    return status.state == "lost" and status.words.startswith(f"{node.node}:")


def devices_on(node: GrantedNode) -> list[str]:
    """Name the devices that were granted on a node: `h1/cuda:3`, `h1/GPU-5f0c…`, `h1/cpu`."""
    short = [f"cuda:{one}" if one.isdigit() else one[:12] for one in node.devices]
    return [f"{node.node}/{name}" for name in short or ["cpu"]]


def names_of(devices: Sequence[Device]) -> tuple[str, ...]:
    """Name the devices of a pool as `PoolSetup.devices` does: () for one named by its kind, and on nodes."""
    if isinstance(devices[0], NodesShape):
        return ()
    names = tuple(device.name for device in devices)
    return () if names == (devices[0].kind,) else names


def load_pool(root: Path) -> Pool | None:
    """Read the pool of a directory; None when it has no readable `pool.json`."""
    try:
        return Pool(msgspec.json.decode((root / "pool.json").read_bytes(), type=PoolSetup), root)
    except (OSError, msgspec.MsgspecError):
        return None


@dataclass(eq=False, repr=False)
class Pools(dict[str, Pool]):
    """The pools by their ids.

    gone_since: the monotonic time at which a run's pool was found gone, by the run's name.
    lost: directories of pools whose `pool.json` cannot be read.
    """

    gone_since: dict[str, float] = field(default_factory=dict)
    lost: list[Path] = field(default_factory=list)
