"""What is known of the devices of this machine, and of the machine itself; a new daemon does without it."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from lorad.box.machine import Machine, read_machine
from lorad.daemon.gpu.devices import Device
from lorad.daemon.gpu.lock_notes import Notes
from lorad.daemon.gpu.occupancy import Sights
from lorad.records.devices import DeviceSample

PERIOD = 10.0  # seconds between two samples
_MOST_SAMPLES = 360  # of a device: an hour


@lru_cache(maxsize=1)
def _machine_in(second: int) -> Machine:
    """Read the machine once a second, however many runs of a long queue ask for it."""
    return read_machine()


@dataclass
class DeviceHistory:
    """Samples of the last hour by the name of the device, oldest first."""

    samples: dict[str, deque[DeviceSample]] = field(default_factory=dict)
    _at: float = float("-inf")  # monotonic

    def is_due(self) -> bool:
        return time.monotonic() - self._at >= PERIOD

    def take(self, samples: dict[str, DeviceSample]) -> None:
        self._at = time.monotonic()
        for name, sample in samples.items():
            self.samples.setdefault(name, deque(maxlen=_MOST_SAMPLES)).append(sample)


@dataclass(frozen=True)
class SetAside:
    """Why nothing is placed on a device for a while.

    why: the reason.
    says: the reason, with what can be done about it.
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

    who: the process, in words.
    since: when it was first seen.
    left: when it was no longer there; None while it is.
    """

    who: str
    since: float
    left: float | None = None


@dataclass
class GpuState:
    """What `gpu/` remembers.

    notes: the notes beside the locks of GPUs.
    sights: who computes on GPUs.
    neighbours: who computes on devices beside runs that yield, by the device's name.
    in_the_way: idle pools, by name, that end at once for a neighbour.
    set_aside: devices that are not for runs now, by name; see `queue/set_aside.py`.
    history: what was measured of the devices in the last hour.
    machine: reads what this machine is, again each second.
    """

    devices: list[Device]
    notes: Notes = field(default_factory=Notes)
    sights: Sights = field(default_factory=Sights)
    neighbours: dict[str, Neighbour] = field(default_factory=dict)
    in_the_way: frozenset[str] = frozenset()
    set_aside: dict[str, SetAside] = field(default_factory=dict)
    history: DeviceHistory = field(default_factory=DeviceHistory)
    machine: Callable[[], Machine] = lambda: _machine_in(int(time.monotonic()))
