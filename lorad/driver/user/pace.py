"""The pace of reward functions: how long a process's first call may take, and how many processes to have."""

import math
from collections.abc import Callable

from lorad.box.machine import available_memory

_FIRST_SECONDS = 60.0
_FIRST_TIMES = 10.0
_MOST_LOST = 3  # first calls that take too long, while none has ended
_MOST_PROCESSES = 64  # where the spec names no number
_MEASURED_SECONDS = 0.3  # of calls, until their processor time says something
_MEMORY_SHARE = 4  # processes are added in a quarter of the memory that is free


class FirstCalls:
    """How much time the first call of a process has: it may load a model. Guarded by its user's lock.

    Until one has ended it is ten times reward.timeout and at least a minute; afterwards twice what the
    slowest one took beside reward.timeout. Where one was given the former in vain, others get reward.timeout
    alone.
    """

    def __init__(self, name: str, timeout: float, *, may_load: bool = True) -> None:
        self._name = name
        self._timeout = timeout
        self._slowest: float | None = None if may_load else 0.0
        self._lost = 0
        self.note = ""  # what the run should say, once

    @property
    def seconds(self) -> float:
        if self._slowest is not None:
            return self._timeout + 2 * self._slowest
        return self._timeout if self._lost else max(_FIRST_SECONDS, _FIRST_TIMES * self._timeout)

    def note_end(self, seconds: float) -> None:
        """Note that the first call of a process took so long."""
        if seconds > self._timeout and (self._slowest is None or self._slowest <= self._timeout):
            self.note = (
                f"the first call of {self._name} in a process took {seconds:.0f} s, longer than "
                f"reward.timeout ({self._timeout:g} s): each process has that time for its first call, as it "
                "may load a model then"
            )
        self._slowest = max(seconds, self._slowest or 0.0)

    def note_loss(self) -> str:
        """Note that a first call did not end in time. Returns why no other is to be begun; "" if one may."""
        self._lost += 1
        if self._slowest is not None or self._lost < _MOST_LOST:
            return ""
        return (
            f"no call of {self._name} has ever ended: {self._lost} processes were killed at their first one. "
            "Raise reward.timeout, or load what it needs when the file is imported, which has a minute"
        )


class Growth:
    """Return how many processes keep the cores busy and fit into memory. Needs a lock."""

    def __init__(self, cores: int, available: Callable[[], int] = available_memory) -> None:
        """Begin without measurements. The processes may keep `cores` busy."""
        self._cores = cores
        self._available = available
        self._seconds = self._computed = 0.0
        self._memory = 1

    def note_call(self, seconds: float, computed: float, memory: int) -> None:
        """Note a call, the seconds in which it computed or waited for a core, and its process's memory."""
        self._seconds += seconds
        self._computed += min(computed, seconds)
        self._memory = max(self._memory, memory)

    def worth(self, count: int) -> int:
        """Return how many processes are worth having, where there are `count`."""
        if self._seconds < _MEASURED_SECONDS:
            return count
        share = max(self._computed / self._seconds, self._cores / _MOST_PROCESSES)
        worthwhile = min(math.floor(self._cores / share), _MOST_PROCESSES)
        if worthwhile <= count:
            return count
        return min(worthwhile, count + self._available() // _MEMORY_SHARE // self._memory)
