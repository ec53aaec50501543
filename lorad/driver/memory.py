"""Memory that this process could still get."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes: what the kernel says is available, or what the control group still allows when that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        lines = (cgroup / "memory.stat").read_text().splitlines()
        cache = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError):  # no control group, or "max"
        return free
    return min(free, max(0, limit - used + cache))
