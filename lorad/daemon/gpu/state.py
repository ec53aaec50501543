"""What is known of the devices of this machine, and of the machine itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lorad.box.machine import Machine, read_machine
from lorad.daemon.gpu.devices import Device
from lorad.daemon.gpu.history import DeviceHistory
from lorad.daemon.gpu.lock_notes import Notes
from lorad.daemon.gpu.occupancy import Sights


def _recently(read: Callable[[], Machine]) -> Callable[[], Machine]:
    """Return what reads the machine once a second, however many runs of a long queue ask for it."""
    seen: list[tuple[float, Machine]] = []

    def recent() -> Machine:
        if not seen or time.monotonic() - seen[0][0] > 1.0:
            seen[:] = [(time.monotonic(), read())]
        return seen[0][1]

    return recent


@dataclass(frozen=True)
class SetAside:
    """Why nothing is placed on a device for a while.

    says: the same, with what can be done about it.
    urgent: the runs there stop at their next step.
    reserved: no pool may be there either, not even one that only serves.
    quiet_until: when its quiet hours end, in Unix time; None outside of them.
    """

    why: str
    says: str
    urgent: bool
    reserved: bool = True
    quiet_until: float | None = None


@dataclass(frozen=True)
class Neighbour:
    """A process outside of lorad that computes on a device, or did a moment ago. Times are monotonic.

    since: when it was seen first.
    left: when it was not there any more; None while it is.
    """

    who: str
    since: float
    left: float | None = None


@dataclass
class GpuState:
    """What `gpu/` remembers.

    notes: what stands beside the locks of GPUs.
    sights: who computes on GPUs.
    neighbours: who computes on devices beside runs that yield, by the device's name.
    in_the_way: idle pools, by name, that end at once for a neighbour.
    set_aside: devices that are not for runs now, by name; see `queue/set_aside.py`.
    history: what was measured of the devices in the last hour.
    """

    devices: list[Device]
    notes: Notes = field(default_factory=Notes)
    sights: Sights = field(default_factory=Sights)
    neighbours: dict[str, Neighbour] = field(default_factory=dict)
    in_the_way: frozenset[str] = frozenset()
    set_aside: dict[str, SetAside] = field(default_factory=dict)
    history: DeviceHistory = field(default_factory=DeviceHistory)
    machine: Callable[[], Machine] = field(default_factory=lambda: _recently(read_machine))
