"""The last hour of each device, in memory: it ends with the daemon."""

import time
from collections import deque
from dataclasses import dataclass, field

from lorad.records.devices import DeviceSample

PERIOD = 10.0  # seconds between two samples
_KEPT = 360  # samples of a device: an hour


@dataclass
class DeviceHistory:
    """Samples by the name of the device, oldest first."""

    samples: dict[str, deque[DeviceSample]] = field(default_factory=dict)
    _at: float = float("-inf")  # monotonic

    def is_due(self) -> bool:
        return time.monotonic() - self._at >= PERIOD

    def take(self, samples: dict[str, DeviceSample]) -> None:
        self._at = time.monotonic()
        for name, sample in samples.items():
            self.samples.setdefault(name, deque(maxlen=_KEPT)).append(sample)
