"""A pool as the daemon sees it: its `pool.json`, its process, what it said last."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from lorad.backends.registry import RANKED, SERVERS
from lorad.backends.setup import ranks_setup, server_setup
from lorad.box.config import Backend, Config
from lorad.box.paths import AttemptDir
from lorad.daemon.gpu.devices import Device
from lorad.daemon.process.processes import ProcessState, attempts_under
from lorad.protocol.pool_setup import Dtype, Mode, PoolSetup
from lorad.protocol.preflight import BaseFacts
from lorad.protocol.status import Capacity, PoolStatus
from lorad.spec.model import Spec


class Refusal(NamedTuple):
    """A pool did not take a version that it should keep: how often, and when (monotonic)
    it is asked again.
    """

    times: int
    not_before: float


class Room(NamedTuple):
    """What `capacity` was computed from: as long as neither changes,
    it holds for everybody in a long queue.
    """

    status: PoolStatus | None
    tenants: list[tuple[str, int]]
    capacity: Capacity


@dataclass
class Pool:
    """`process` is of the newest attempt; `status` is None until it has answered."""

    setup: PoolSetup
    root: Path
    process: ProcessState = field(default_factory=lambda: ProcessState("absent"))
    status: PoolStatus | None = None
    polled_at: float = 0.0
    asked_at: float = 0.0  # the newest question, whose answer makes `polled_at`
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_slow: bool = False  # it took its time for that, or said nothing
    guests: int = 0  # requests that use it and are no runs
    serves: set[str] = field(default_factory=set)  # runs for which it is kept up, see `serving/keep_up.py`
    used_at: float = field(default_factory=time.monotonic)
    stop_asked: float | None = None
    held_at: tuple[float, int] = (0.0, 0)  # of `serving/keep_loaded.py`: what it saw last
    is_holding: bool = False
    checked: tuple[float, str] = (float("-inf"), "")  # when, and what was wrong with its directory then
    room: Room | None = None
    refusals: dict[str, Refusal] = field(default_factory=dict)  # run@version -> why it is not kept
    # run@version -> the warning that its run had about that
    told: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.setup.pool

    @property
    def work(self) -> Path:
        """Where its process writes; it has one of its own where it belongs to another user
        than the daemon.
        """
        theirs = self.root / "work"
        return theirs if theirs.is_dir() else self.root

    @property
    def number(self) -> int:
        """Of the newest attempt; 0 when there is none."""
        return max((int(attempt.root.name) for attempt in attempts_under(self.root)), default=0)

    def attempt(self, number: int | None = None) -> AttemptDir:
        return AttemptDir(self.root / "attempts" / f"{self.number if number is None else number:04d}")

    @property
    def state(self) -> str:
        """starting | ready | stopping | ended."""
        if not self.process.is_up:
            return "ended"
        return "stopping" if self.stop_asked is not None else "starting" if self.status is None else "ready"

    @property
    def idle_seconds(self) -> float:
        """Since the last use of any kind."""
        here = time.monotonic() - self.used_at
        return 0.0 if self.guests else min(here, self.status.idle_seconds) if self.status else here


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
    """The pool that a run needs on these devices, without an id. `dtype`: of the checkpoint.

    facts: what the preflight found; cwd: where relative paths of the spec start; both matter to servers only.
    Raises SpecError when config.yaml lacks the backend, ValidationError when the facts are too few.
    """
    trainer = config.backends.get(spec.trainer.backend, Backend())
    engine = config.backends.get(spec.rollout.backend, Backend())
    names = tuple(device.name for device in devices)
    on_cpu, is_slot = devices[0].is_cpu, names[0] != devices[0].kind
    return PoolSetup(
        pool="",
        model=spec.model.path,
        model_path=model_path,
        dtype=dtype_of(spec, dtype, on_cpu=on_cpu),
        trainer=spec.trainer.backend,
        engine=spec.rollout.backend,
        mode=mode_of(spec, on_cpu),
        threads=threads,
        device=devices[0].kind,
        devices=names if len(names) > 1 or is_slot else (),
        deterministic=on_cpu if spec.deterministic is None else spec.deterministic,
        memory_fraction=spec.pool.memory_fraction / (config.devices.cpu_slots if is_slot else 1),
        trainer_class=trainer.trainer,
        engine_class=engine.engine,
        pythonpath=engine.pythonpath or trainer.pythonpath,
        server=server_setup(spec, engine, facts or BaseFacts(), Path(cwd))
        if spec.rollout.backend in SERVERS
        else None,
        ranks=ranks_setup(spec, trainer) if spec.trainer.backend in RANKED else None,
        hang=config.supervision.hang,
    )


def dtype_of(spec: Spec, checkpoint: str, *, on_cpu: bool) -> Dtype:
    """The dtype that the spec asks for. For `auto` it is float32 on a CPU; on a GPU it is the checkpoint's
    own, with bfloat16 in place of whatever is not float32.
    """
    if spec.model.dtype != "auto":
        return spec.model.dtype
    return "float32" if on_cpu or checkpoint == "float32" else "bfloat16"


def mode_of(spec: Spec, on_cpu: bool) -> Mode:
    """A server of the user's stays as it is: others may use it. The builtin engine cannot sleep."""
    if spec.pool.mode != "auto":
        return spec.pool.mode
    if spec.rollout.backend not in SERVERS:
        return "resident" if spec.trainer.backend in RANKED else "fused"
    return "resident" if on_cpu or spec.rollout.urls else "timesliced"


def base_name(model: str) -> str:
    """`builtin:tiny` -> `tiny`, `/models/Qwen3-4B` -> `qwen3-4b`."""
    last = model.rstrip("/").rpartition("/")[2].rpartition(":")[2]
    return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:32] or "base"


def load_pool(root: Path) -> Pool | None:
    """The pool of a directory; None when it has no readable `pool.json`."""
    try:
        return Pool(msgspec.json.decode((root / "pool.json").read_bytes(), type=PoolSetup), root)
    except (OSError, msgspec.MsgspecError):
        return None


class Pools(dict[str, Pool]):
    """The pools by their names.

    gone_since: when a pool was found gone, by its name; monotonic.
    lost: directories of pools that cannot be known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gone_since: dict[str, float] = {}
        self.lost: list[Path] = []
