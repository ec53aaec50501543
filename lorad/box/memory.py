"""Bound the memory that this process takes while it reads the files that users name."""

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lorad.bounds import GIB
from lorad.box.machine import available_memory
from lorad.errors import SpecError
from lorad.text import size

_LEAST = 2 * GIB  # pyarrow reserves one by itself


@dataclass
class _Bound:
    """The limit of this process's memory (RLIMIT_DATA), set as long as any thread is within it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    threads: int = 0
    most: int = 0
    before: int = 0

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        with self.lock:
            self.threads += 1
            if self.threads == 1:
                self.before, hard = resource.getrlimit(resource.RLIMIT_DATA)
                self.most = max(_LEAST, available_memory() // 2)
                data_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
                limits = [data_bytes + self.most, self.before, hard]
                soft = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        try:
            yield
        finally:
            with self.lock:
                self.threads -= 1
                if not self.threads:
                    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
                    resource.setrlimit(resource.RLIMIT_DATA, (self.before, hard))


_BOUND = _Bound()


@contextlib.contextmanager
def bounded_memory(what: str) -> Iterator[None]:
    """Let a block read `what` with half of the available memory. Raises SpecError where it needs more."""
    try:
        with _BOUND.within():
            yield
    except MemoryError:
        hint = "Set data.streaming, or make it smaller: a small file may hold much once it is unpacked."
        raise SpecError(f"{what} takes over {size(_BOUND.most)} of memory", key="data", hint=hint) from None
