"""What a pool is, and what it does now: the answers to `hello` and `status`."""

from msgspec import Struct


class PoolInfo(Struct, frozen=True):
    """What a pool is.

    base_checksum: sha256 over the base's weights as the trainer held them after loading. Trainers that hold
        them differently (sharded, fused) have other checksums.
    model_sha256: sha256 over the weight files, the same for all trainers.
    parameters: number of parameters of the base; 0 where it is not known.
    teacher, teacher_sha256: the model that is held beside it for its log-probabilities, and its weight files;
        "" for none.
    losses: what its trainer knows of `LOSSES` in lorad/protocol/batch.py.
    ranks: whether its engine gives log-probabilities of texts (`rank`).
    formats: whether its engine can follow a JSON schema.
    """

    pool: str
    pid: int
    model: str  # the spec's name for it
    model_path: str
    base_checksum: str
    trainer: str
    engine: str
    mode: str
    device: str
    dtype: str
    threads: int
    max_tokens: int
    versions: dict[str, str]  # versions of software: lorad, torch, the backends
    model_sha256: str = ""
    parameters: int = 0
    losses: tuple[str, ...] = ()
    teacher: str = ""
    teacher_sha256: str = ""
    ranks: bool = False
    formats: bool = False


class Tenant(Struct, frozen=True):
    """A run in a pool.

    phase: the verb in progress, or `idle`.
    bytes: size of its slot.
    waited: seconds that it has waited since it was opened, see `Stepped`.
    """

    run: str
    attempt: int
    phase: str
    parameters: int
    bytes: int = 0
    waited: float = 0.0


class Capacity(Struct, frozen=True):
    """What runs may still take of a pool. Bytes count slots (weights, gradients, Adam) and loaded versions.

    versions: how many are loaded or about to be, of at most max_versions.
    memory: bytes for slots and versions in all; 0 where it is not known.
    """

    max_versions: int
    versions: int
    max_rank: int
    memory: int = 0
    memory_used: int = 0


class EngineStatus(Struct, frozen=True):
    """The state of an engine, see `EngineHealth` in lorad/engines/base.py. None stands for what it does not
    report.

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
    """The state of a trainer, see `TrainerHealth` in lorad/trainers/base.py.

    here: its base is on its devices, not in host memory.
    """

    alive: bool
    detail: str = ""
    here: bool = True
    memory: int | None = None
    memory_peak: int | None = None


class PoolStatus(Struct, frozen=True):
    """What a pool does now. Rates cover the last seconds.

    engine, trainer: None until the pool reports them.
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
