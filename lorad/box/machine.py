"""Read from `/proc` and `/sys` how many CPUs and how much memory a process has, the load, and its malloc.

A container or a batch system grants less than the machine has: by CPU affinity, or by a quota of its cgroup
(`cpu.max`, or `cpu.cfs_quota_us` of version 1) and a limit of its memory. Every group around a process limits
it; the least counts.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT = 1 << 60  # bytes; version 1 writes a number near 2**63 when there is none
_MEMORY = {  # by the version of a cgroup: what it may use, what it does, and what of that can be had again
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_FOREIGN_ALLOCATOR = re.compile(r"/lib(jemalloc|tcmalloc|mimalloc|snmalloc|hoard|scudo)[^/]*\.so")


@dataclass(frozen=True)
class Machine:
    """Describes a machine as a process has it.

    cpus: logical CPUs that the process may use.
    cores: physical cores among them.
    all_cores: physical cores of the whole machine.
    quota: CPUs that the cgroup may use at a time; None without a limit.
    load: runnable processes of the whole machine, as a mean of the last minute.
    memory: bytes, or the cgroup's limit where that is less.
    allocator: `glibc 2.36`, `jemalloc`, ….
    """

    cpus: int
    cores: int
    all_cores: int
    quota: float | None
    load: float
    memory: int
    allocator: str

    @property
    def usable(self) -> int:
        """Return how many threads can compute at a time, at least 1."""
        granted = self.cores if self.quota is None else min(self.cores, int(self.quota + 1e-6))
        return max(1, granted)


def read_machine(pid: int | str = "self", root: Path = Path("/")) -> Machine:
    """Return the machine as process `pid` has it; `proc` and `sys` are directories of `root`."""
    affinity = _cpu_list(_field(root / f"proc/{pid}/status", "Cpus_allowed_list", "0"))
    limits = []
    quotas = []  # how many CPUs each group may use at a time
    for controllers, directory in _groups(root, pid):
        text = _text(directory / ("memory.limit_in_bytes" if controllers else "memory.max"))
        if text not in ("", "max") and (not controllers or "memory" in controllers.split(",")):
            limits.append(int(text))
        quota = period = ""
        if not controllers:
            quota, _, period = _text(directory / "cpu.max").partition(" ")
        elif "cpu" in controllers.split(","):
            quota = _text(directory / "cpu.cfs_quota_us")
            period = _text(directory / "cpu.cfs_period_us")
        if quota not in ("", "max", "-1") and period:
            quotas.append(int(quota) / int(period))
    total = int(_field(root / "proc/meminfo", "MemTotal", "0 kB").split()[0]) * 1024
    every = _cpu_list(_text(root / "sys/devices/system/cpu/online")) or affinity
    load = _text(root / "proc/loadavg").split() or ["0"]
    # malloc is answered by a library that was loaded in front (LD_PRELOAD), else by the C library
    foreign = _FOREIGN_ALLOCATOR.search(_text(root / f"proc/{pid}/maps"))
    allocator = foreign[1] if foreign else "another C library than glibc"
    if not foreign:
        with contextlib.suppress(ValueError, OSError):
            allocator = os.confstr("CS_GNU_LIBC_VERSION") or allocator
    return Machine(
        cpus=len(affinity),
        cores=_cores(root, affinity),
        all_cores=_cores(root, every),
        quota=min(quotas, default=None),
        load=float(load[0]),
        memory=min([total or NO_LIMIT, *(limit for limit in limits if limit < NO_LIMIT)]),
        allocator=allocator,
    )


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that the kernel says are available, or what the cgroups allow if that is less."""
    allowed = [int(_field(root / "proc/meminfo", "MemAvailable", "0 kB").split()[0]) * 1024]
    for controllers, directory in _groups(root, "self"):
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, usage, cached = _MEMORY[1 if controllers else 2]
        most = _text(directory / limit)
        used = _text(directory / usage)
        if most not in ("", "max") and used:
            again = int(_field(directory / "memory.stat", cached, "0"))
            allowed.append(max(0, int(most) - int(used) + again))
    return min(allowed)


def cpu_facts(root: Path = Path("/")) -> dict[str, str]:
    """Return what the kernel says of the first CPU, by its own names; `flags` are always its features."""
    first = _text(root / "proc/cpuinfo").partition("\n\n")[0]
    parts = (line.partition(":") for line in first.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in parts}
    if "Features" in facts:
        facts["flags"] = facts.pop("Features")
    return facts


def _cores(root: Path, cpus: Iterable[int]) -> int:
    """Count physical cores: logical CPUs that share one are listed as siblings."""
    topology = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in cpus)
    return len({_text(path) or str(path) for path in topology})


def _groups(root: Path, pid: int | str) -> Iterator[tuple[str, Path]]:
    """Yield controllers ("" for version 2) and directory of every cgroup around a process, outwards."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / f"proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        names = [controllers, *controllers.split(",")] if controllers else ["", "unified"]
        for mount in (mounts / name for name in dict.fromkeys(names)):
            group = mount / path.lstrip("/")
            for directory in (group, *group.parents):
                yield controllers, directory
                if directory == mount:
                    break


def _cpu_list(text: str) -> list[int]:
    """List the CPUs of the kernel's text: 0, 1, 2 and 5 for `0-2,5`."""
    ends = [part.partition("-") for part in text.split(",") if part]
    return [cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)]


def _field(path: Path, name: str, default: str) -> str:
    field = re.search(rf"^{name}:?\s+(.*)$", _text(path), re.MULTILINE)
    return field[1] if field else default


def _text(path: Path) -> str:
    """Read a file's text without the last newline; "" when it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
