"""A bound on the memory that this process takes while it reads what users name."""

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

from lorad.bounds import GIB
from lorad.box.machine import available_memory
from lorad.errors import SpecError
from lorad.text import size

_LEAST = 2 * GIB  # pyarrow reserves one by itself


class _Bound:
    """The limit of this process's memory (RLIMIT_DATA), set as long as any thread is within it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within = 0
        self.most = 0

    def __enter__(self) -> None:
        with self._lock:
            self._within += 1
            if self._within > 1:
                return
            self._before, hard = resource.getrlimit(resource.RLIMIT_DATA)
            self.most = max(_LEAST, available_memory() // 2)
            data_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
            limits = [data_bytes + self.most, self._before, hard]
            soft = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._within -= 1
            if not self._within:
                hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
                resource.setrlimit(resource.RLIMIT_DATA, (self._before, hard))


_BOUND = _Bound()


@contextlib.contextmanager
def bounded_memory(what: str) -> Iterator[None]:
    """Let what is read within the block take half of the memory that is available at its beginning, and
    never the memory of others.

    what: is read. Raises SpecError where that needs more.
    """
    try:
        with _BOUND:
            yield
    except MemoryError:
        hint = "Set data.streaming, or make it smaller: a small file may hold much once it is unpacked."
        raise SpecError(f"{what} takes over {size(_BOUND.most)} of memory", key="data", hint=hint) from None
