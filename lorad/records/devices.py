"""A device, who holds it, and what is measured of it."""

from msgspec import Struct


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

    since: when it began; None while lorad is still there.
    until: None where it lasts until it is released, or has not begun.
    seconds: how long it lasts from its beginning.
    urgent: whether runs there stop at their next step.
    holder: who is still there.
    """

    user: str = ""
    why: str = ""
    since: float | None = None
    until: float | None = None
    seconds: float | None = None
    urgent: bool = False
    holder: str = ""


class DeviceSample(Struct, frozen=True):
    """What was measured of a device at a moment; None where nobody measures it.

    power: watts.
    temperature: degrees Celsius.
    """

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
    part: str = ""  # `trainer` or `servers`, where only that part of the pool is there (pool.mode split)
    lease: Lease | None = None
    processes: list[DeviceProcess] = []
    reservation: Reservation | None = None
    quiet_until: float | None = None  # when its quiet hours end
    power: float | None = None  # watts
    temperature: int | None = None  # degrees Celsius
    history: list[DeviceSample] = []  # the last hour, oldest first, where it was asked for
