"""The answers of the daemon about pools, devices, itself and its files. UNSET: the answer has no such key."""

from msgspec import UNSET, Struct, UnsetType

from lorad.protocol.status import Capacity

# -- the machine ---------------------------------------------------------------------------------------------


class PoolRun(Struct, frozen=True):
    """A run with an open slot in a pool."""

    run: str
    phase: str = ""  # the verb under way, or `idle`
    bytes: int = 0  # size of the slot
    waited: float = 0.0  # seconds for its turn


class Why(Struct, frozen=True):
    source: str
    text: str = ""


class Runtime(Struct, frozen=True):
    """What the process of a pool was started with."""

    threads: int
    wait_policy: str = ""
    malloc: dict[str, int] = {}
    reasons: dict[str, Why] = {}  # why threads, wait_policy and malloc are what they are


class Engine(Struct, frozen=True):
    """An engine, see EngineHealth in lorad/engines/base.py.

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


class Trainer(Struct, frozen=True):
    """A trainer, see TrainerHealth in lorad/trainers/base.py.

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
    runtime: Runtime | None = None
    tenants: list[str] = []  # names of the runs in it
    runs: list[PoolRun] = []
    capacity: Capacity | None = None
    loaded: list[str] = []  # run@version
    engine_tokens_per_second: float = 0.0
    trainer_tokens_per_second: float = 0.0
    engine: Engine = Engine()
    trainer: Trainer = Trainer()
    devices: list[str] = []
    memory_bytes: int | None = None
    idle_seconds: float = 0.0
    nodes: list[str] = []  # of a cluster
    waiting: str = ""  # what it asks a cluster for, and what is lacking


class Node(Struct, frozen=True):
    """A node of a cluster.

    state: granted to a pool, free, lost, or `unknown` before a pool had it.
    devices: names of those that were granted last. count: how many it has; 0: none, or nobody knows yet.
    free: those of `count` that no pool of this daemon has. agents: `pool@life` of each pool that has it.
    bases: directories of base models that were loaded there, the newest last.
    seen_at: Unix time at which something was heard of it last. says: the last that happened to it.
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


class Lease(Struct, frozen=True):
    pool: str | None = None
    uid: int | None = None
    user: str = ""
    why: str = ""
    since: float | None = None
    free_after: float | None = None  # seconds of idleness


class DeviceProcess(Struct, frozen=True):
    pid: int
    user: str = ""
    name: str = ""
    memory: int | None = None
    ours: bool = False  # belongs to a pool of this daemon


class Reservation(Struct, frozen=True):
    """A device that a user keeps for work without lorad.

    since: when it began; None while lorad is still there. until: None: until it is released, or not known
    before it begins. seconds: how long it lasts from its beginning. urgent: runs there stop at their next
    step. holder: who is still there.
    """

    user: str = ""
    why: str = ""
    since: float | None = None
    until: float | None = None
    seconds: float | None = None
    urgent: bool = False
    holder: str = ""


class DeviceSample(Struct, frozen=True):
    """A device at a moment. power: watts. temperature: degrees Celsius. None: nobody measures it."""

    at: float
    memory: int = 0
    utilization: float | None = None
    power: float | None = None
    temperature: int | None = None


class Device(Struct, frozen=True):
    device: str
    name: str = ""
    memory_total: int = 0
    memory_used: int = 0
    utilization: float | None = None  # 0 to 1
    pool: str | None = None  # a pool of this daemon; the lease names other daemons' pools as well
    lease: Lease | None = None
    processes: list[DeviceProcess] = []
    reservation: Reservation | None = None
    quiet_until: float | None = None  # when its quiet hours end
    power: float | None = None  # watts
    temperature: int | None = None  # degrees Celsius
    history: list[DeviceSample] = []  # the last hour, oldest first, where it was asked for


class Orphan(Struct, frozen=True):
    """A process of this home that no attempt accounts for."""

    pid: int
    attempt: str
    command: str = ""
    user: str = ""


# -- the daemon ----------------------------------------------------------------------------------------------


class Caller(Struct, frozen=True):
    """Who asks, as the daemon sees it."""

    user: str = ""
    admin: bool = True


class Disk(Struct, frozen=True):
    """The filesystem that runs write to."""

    free: int
    total: int = 0


class DatabaseSize(Struct, frozen=True):
    schema: str | None = None
    bytes: int = 0


class Forecasts(Struct, frozen=True):
    """How forecasts of starts compare with what happened in the last days.

    count: those of runs that started. off: the median of how far they were off, as a share of the time that
    the run waited from then on.
    """

    days: int = 7
    count: int = 0
    off: float | None = None


class Status(Struct, frozen=True):
    pid: int = 0
    version: str = ""
    home: str = ""
    caller: Caller = Caller()
    shared: bool = False  # serves several users
    started_at: float = 0.0
    gateway: str | None = None  # its socket; None while none answers
    url: str | None = None  # the base URL where it listens on TCP
    key_file: str | None = None  # that holds the key of the home's owner for that
    url_trouble: str = ""  # why it lets nobody in there
    runs: dict[str, int] = {}  # state -> count
    troubles: list[str] = []
    disk: Disk | None = None
    database: DatabaseSize = DatabaseSize()
    forecasts: Forecasts = Forecasts()


class StayingPool(Struct, frozen=True):
    """A pool that stays up without a daemon."""

    pool: str
    runs: list[str] = []
    serves: list[str] = []  # run@version
    seconds: float = 0.0  # idle time after which it ends by itself


class Shutdown(Struct, frozen=True):
    pid: int
    gateway: bool = False  # the gateway ends as well
    ended: list[str] = []  # pools
    staying: list[StayingPool] = []


class Finding(Struct, frozen=True):
    what: str  # is wrong, and where
    advice: str = ""


class Census(Struct, frozen=True):
    """The whole database, and its rows against the disk."""

    problems: list[str]
    warnings: list[str]
    missing: list[Finding]  # files that something needs
    unknown: list[Finding]  # files that no row names
    runs: int = 0


class Repaired(Struct, frozen=True):
    """The result of a repair.

    counts: rows by table.
    kept: the old database; None where there was none.
    told: what could not be taken over, and what did not come from the daemon's journal alone.
    """

    database: str
    kept: str | None
    counts: dict[str, int]
    told: list[str]


class Check(Struct, frozen=True):
    check: str
    looked_at: str  # says how much was looked at
    problems: list[str]  # each names what it is about
    seconds: float = 0.0


class Verification(Struct, frozen=True):
    run: str
    checks: list[Check] = []
    problems: int = 0


class Deleted(Struct, frozen=True):
    run: str | None
    path: str
    bytes: int = 0
    why: str = ""


class KeptVersion(Struct, frozen=True):
    """A version that an alias can go back to."""

    alias: str
    version: str  # run@number


class Collected(Struct, frozen=True):
    """What a garbage collection deleted, or would delete."""

    deleted: list[Deleted] = []
    bytes: int = 0
    dry_run: bool = False
    kept: list[KeptVersion] = []


# -- the bill ------------------------------------------------------------------------------------------------


class BillLine(Struct, frozen=True, kw_only=True):
    """What was used by one run, user, sweep, alias or pool, or on one day.

    key: its name; "" for what is nobody's: a pool was warm, started, or worked for itself.
    owner: "" where it is of several users. held, busy: device-seconds, see `Use` in lorad/protocol/status.py.
    wasted: of `held`, what a later attempt threw away; wasted_tokens: the same of `sampled`.
    sampled, trained: tokens of the steps of runs; by alias and pool, of all that pools sampled and trained.
    generated: tokens that pools sampled for runs, with those of evaluations and of steps that never ended.
    served: tokens for whoever asked the gateway. prompts, cached: tokens of prompts, and those of them that
    were not computed again. joules: None where nothing measures them. memory: bytes, the most of a slot; of
    nobody, of a pool. disk: bytes of the runs that are there; None where they are not of runs.
    cost: None where a device has no price.
    """

    key: str = ""
    owner: str = ""
    held: float = 0.0
    busy: float = 0.0
    wasted: float = 0.0
    sampled: int = 0
    trained: int = 0
    generated: int = 0
    served: int = 0
    wasted_tokens: int = 0
    prompts: int = 0
    cached: int = 0
    joules: float | None = None
    memory: int = 0
    disk: int | None = None
    cost: float | None = None


class Quota(Struct, frozen=True):
    """How much a user has used of the device-hours that they may use in a span of time up to now.

    per: the span, like 7d. again: the Unix time from which it is not all used, at the earliest; None: it is
        not all used, or there is no such time.
    """

    user: str
    used: float = 0.0
    most: float = 0.0
    per: str = ""
    again: float | None = None


class Bill(Struct, frozen=True):
    """Who used how much, the greatest first. since, until: Unix times of whole hours; None: from the first,
    or until now.
    """

    by: str
    rows: list[BillLine]
    total: BillLine
    currency: str = ""
    since: float | None = None
    until: float | None = None
    quotas: list[Quota] = []  # of users who have one and used devices in its span


# -- the fronts of a shared box ------------------------------------------------------------------------------


class ServingOwner(Struct, frozen=True):
    """Whose gateway answers with a version."""

    version: str  # run@number
    owner_uid: int


class DoorOwner(Struct, frozen=True):
    """Whose a Tinker door is."""

    owner_uid: int
