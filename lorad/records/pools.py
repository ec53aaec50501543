"""A pool, and a node of a cluster. UNSET: the answer has no such key."""

from msgspec import UNSET, Struct, UnsetType

from lorad.protocol.status import Capacity


class PoolRun(Struct, frozen=True):
    """A run with an open slot in a pool."""

    run: str
    phase: str = ""  # the verb under way, or `idle`
    bytes: int = 0  # size of the slot
    waited: float = 0.0  # seconds for its turn


class RuntimeReason(Struct, frozen=True):
    source: str
    text: str = ""


class PoolRuntime(Struct, frozen=True):
    """What the process of a pool was started with."""

    threads: int
    wait_policy: str = ""
    malloc: dict[str, int] = {}
    reasons: dict[str, RuntimeReason] = {}  # why threads, wait_policy and malloc are what they are


class PoolEngine(Struct, frozen=True):
    """An engine, see `EngineStatus` in lorad/protocol/status.py.

    Before the pool answers there is only the name.
    """

    name: str = ""
    software: str | UnsetType | None = UNSET
    alive: bool | UnsetType = UNSET
    asleep: bool | UnsetType = UNSET
    running: int | UnsetType = UNSET
    waiting: int | UnsetType = UNSET
    slots_used: int | UnsetType | None = UNSET
    slots: int | UnsetType | None = UNSET
    prefix_hits: float | UnsetType | None = UNSET
    cache_used: float | UnsetType | None = UNSET
    detail: str | UnsetType = UNSET
    adapters_per_step: float | UnsetType | None = UNSET


class PoolTrainer(Struct, frozen=True):
    """A trainer, see `TrainerStatus` in lorad/protocol/status.py.

    Before the pool answers there is only the name.
    """

    name: str = ""
    software: dict[str, str] | UnsetType = UNSET
    alive: bool | UnsetType = UNSET
    detail: str | UnsetType = UNSET
    here: bool | UnsetType = UNSET  # its base is on its devices, not in host memory
    memory: int | UnsetType | None = UNSET
    memory_peak: int | UnsetType | None = UNSET


class Pool(Struct, frozen=True):
    pool: str
    state: str = ""
    model: str = ""
    pid: int | None = None
    device: str = ""  # the first one
    mode: str = ""
    threads: int | None = None
    runtime: PoolRuntime | None = None
    tenants: list[str] = []  # names of the runs in it
    runs: list[PoolRun] = []
    capacity: Capacity | None = None
    loaded: list[str] = []  # run@version
    engine_tokens_per_second: float = 0.0
    trainer_tokens_per_second: float = 0.0
    engine: PoolEngine = PoolEngine()
    trainer: PoolTrainer = PoolTrainer()
    devices: list[str] = []
    memory_bytes: int | None = None
    idle_seconds: float = 0.0
    nodes: list[str] = []  # of a cluster
    waiting: str = ""  # what it asks a cluster for, and what is lacking


class NodeStatus(Struct, frozen=True):
    """A node of a cluster.

    state: granted to a pool, free, lost, or `unknown` before a pool had it.
    devices: names of the devices that were granted last.
    count: how many devices it has; 0 where it has none, or nobody knows yet.
    free: how many devices no pool of this daemon has.
    agents: `pool@life` of each pool that has it.
    bases: directories of base models that were loaded there, the newest last.
    seen_at: Unix time at which something was heard of it last.
    says: the last thing that happened to it.
    """

    node: str
    cluster: str = ""
    state: str = "unknown"
    address: str = ""
    devices: list[str] = []
    count: int = 0
    free: int = 0
    agents: list[str] = []
    bases: list[str] = []
    seen_at: float | None = None
    says: str = ""
