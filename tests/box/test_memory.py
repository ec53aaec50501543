"""How much memory is there, and that what is read takes no more than its share of it."""

from pathlib import Path

import pytest

from lorad.box import machine, memory
from lorad.box.machine import NO_LIMIT, available_memory
from lorad.box.memory import bounded_memory
from lorad.errors import SpecError

MIB = 1 << 20


@pytest.mark.parametrize(
    ("line", "place", "version"),
    [
        ("0::/", ".", 2),
        ("0::/user.slice/me", "user.slice", 2),
        ("4:memory:/jobs/7", "memory/jobs/7", 1),
        ("4:cpu,memory:/of/a/host", "cpu,memory", 1),
    ],
)
def test_control_groups_limit_what_is_available(tmp_path: Path, line: str, place: str, version: int) -> None:
    limit, usage, cached = machine._MEMORY[version]
    group = tmp_path / "sys/fs/cgroup" / place
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpuset:/\n{line}\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (group / usage).write_text("4000000\n")
    (group / "memory.stat").write_text(f"anon 1\n{cached} 200000\n")
    (group / limit).write_text("5000000\n")
    assert available_memory(root=tmp_path) == 1_200_000
    (group / limit).write_text(f"{NO_LIMIT}\n" if version == 1 else "max\n")
    assert available_memory(root=tmp_path) == 8_192_000


def test_what_needs_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LEAST", 32 * MIB)
    monkeypatch.setattr(memory, "available_memory", lambda: 0)
    says = pytest.raises(SpecError, match=r"a\.json takes over 32\.0 MiB of memory")
    with says, bounded_memory("rows"), bounded_memory("a.json"):
        bytearray(64 * MIB)
    assert len(bytearray(64 * MIB)) == 64 * MIB, "the limit is only of what is read"
