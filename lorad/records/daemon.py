"""The daemon itself, its database, and what it checks and deletes."""

from msgspec import Struct


class Orphan(Struct, frozen=True):
    """A process of this home that no attempt accounts for."""

    pid: int
    attempt: str
    command: str = ""
    user: str = ""


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

    count: how many runs with a forecast have started.
    off: how far forecasts were off, as a share of the time that the run then waited; the median.
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


class VerificationCheck(Struct, frozen=True):
    check: str
    looked_at: str  # says how much was looked at
    problems: list[str]  # each names what it is about
    seconds: float = 0.0


class Verification(Struct, frozen=True):
    run: str
    checks: list[VerificationCheck] = []
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
