"""Who a pool is, and what it does now: the answers to `hello` and `status`."""

from __future__ import annotations

from msgspec import Struct


class PoolInfo(Struct, frozen=True):
    """Who a pool is.

    base_checksum: sha256 over the base's weights as the trainer holds them, when they were loaded: trainers that hold
    them otherwise (sharded, fused) have others. model_sha256: over the weight files, the same for all of them.
    parameters: of the base, 0 when not told.
    """

    pool: str
    pid: int
    model: str  # as in the spec
    model_path: str
    base_checksum: str
    trainer: str
    engine: str
    mode: str
    device: str
    dtype: str
    threads: int
    max_tokens: int
    versions: dict[str, str]  # of software: lorad, torch, the backends
    model_sha256: str = ""
    parameters: int = 0


class Tenant(Struct, frozen=True):
    """phase: the verb under way, or `idle`. bytes: of its slot. waited: seconds since it was opened, see `Stepped`."""

    run: str
    attempt: int
    phase: str
    parameters: int
    bytes: int = 0
    waited: float = 0.0


class Capacity(Struct, frozen=True):
    """What runs may still take of a pool. Bytes are of slots (weights, gradients, Adam) and of loaded versions.

    versions: loaded, or about to be, of at most max_versions; memory: bytes for them in all, 0 when not told.
    """

    max_versions: int
    versions: int
    max_rank: int
    memory: int = 0
    memory_used: int = 0


class EngineStatus(Struct, frozen=True):
    """See `EngineHealth` in lorad/engines/base.py. None: it is not told.

    adapters_per_step: median number of distinct versions in the last decode steps that had any.
    """

    alive: bool
    asleep: bool
    running: int
    waiting: int
    slots_used: int | None = None
    slots: int | None = None
    prefix_hits: float | None = None
    cache_used: float | None = None
    detail: str = ""
    adapters_per_step: float | None = None


class TrainerStatus(Struct, frozen=True):
    """See `TrainerHealth` in lorad/trainers/base.py. here: its base is on its devices, not in host memory."""

    alive: bool
    detail: str = ""
    here: bool = True
    memory: int | None = None
    memory_peak: int | None = None


class PoolStatus(Struct, frozen=True):
    """What a pool does now. Rates are of the last seconds. engine, trainer: None from a pool that does not tell yet.

    kept: see `LoadVersion`.
    """

    info: PoolInfo
    tenants: list[Tenant]
    loaded: list[str]
    engine_tokens_per_second: float
    trainer_tokens_per_second: float
    rss_bytes: int
    idle_seconds: float  # since the last call of a run; 0 while one is under way
    engine: EngineStatus | None = None
    trainer: TrainerStatus | None = None
    kept: list[str] = []
    capacity: Capacity | None = None
