"""Threads, waiting and malloc: what is chosen for which machine, and who may decide otherwise."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorad.box.config import RuntimeSettings, load
from lorad.box.machine import Machine, read_machine
from lorad.box.runtime import PER_THREAD, SMALL_MODEL, Overrides, Runtime, choose_runtime
from lorad.errors import SpecError

MIB, GIB = 1 << 20, 1 << 30
IDLE = Machine(cpus=8, cores=8, all_cores=8, quota=None, load=0.1, memory=64 * GIB, allocator="glibc 2.36")
LARGE = 1_000_000_000


def choose(
    machine: Machine = IDLE, parameters: int = LARGE, device: str = "cpu", **overrides: Any
) -> Runtime:
    return choose_runtime(parameters, machine, device, Overrides(**overrides))


def test_threads_grow_with_the_size_of_the_model() -> None:
    sizes = (SMALL_MODEL - 1, SMALL_MODEL, LARGE)
    assert [choose(parameters=size).threads for size in sizes] == [1, SMALL_MODEL // PER_THREAD, 8]


@pytest.mark.parametrize(("load", "threads"), [(0.4, 8), (3.2, 5), (7.0, 1), (40.0, 1)])
def test_large_model_leaves_busy_cores_to_others(load: float, threads: int) -> None:
    assert choose(replace(IDLE, load=load)).threads == threads


def test_load_on_other_cores_leaves_granted_ones_free() -> None:
    assert choose(replace(IDLE, cores=4, all_cores=64, load=20.0)).threads == 4


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (3.0, 3), (2.5, 2), (0.5, 1)])
def test_cgroup_quota_is_respected(quota: float | None, threads: int) -> None:
    assert choose(replace(IDLE, quota=quota)).threads == threads


def test_hyperthreads_are_no_cores() -> None:
    assert choose(replace(IDLE, cpus=8, cores=4, all_cores=4)).threads == 4


def test_gpu_needs_few_threads() -> None:
    assert choose(device="cuda:0").threads == 4
    assert choose(replace(IDLE, cores=2), device="cuda:0").threads == 2


def test_threads_come_from_the_most_specific_source() -> None:
    asked: dict[str, Any] = {
        "run": 2,
        "spec": 3,
        "config": RuntimeSettings(threads=4),
        "environment": {"OMP_NUM_THREADS": "5,2"},
    }
    for threads, source in ((2, "run"), (3, "spec"), (4, "config"), (5, "environment"), (8, "load")):
        chosen = choose(**asked)
        assert (chosen.threads, chosen.reasons["threads"].source) == (threads, source)
        asked.pop(source, None)


def test_threads_beyond_the_cores_come_with_a_reason() -> None:
    chosen = choose(replace(IDLE, cores=2), run=6)
    assert chosen.threads == 6 and "only 2 can run" in chosen.reasons["threads"].text


@pytest.mark.parametrize("value", ["", "many", "0", "-1"])
def test_environment_that_is_no_count_is_not_heard(value: str) -> None:
    assert choose(environment={"OMP_NUM_THREADS": value}).threads == 8


def test_active_waiting_needs_a_request_and_idle_cores() -> None:
    active = RuntimeSettings(wait_policy="active")
    assert choose().wait_policy == "passive"
    assert choose(config=active).wait_policy == "active"
    assert choose(environment={"OMP_WAIT_POLICY": "ACTIVE"}).wait_policy == "active"
    busy = choose(replace(IDLE, load=3.0), spec=8, config=active)
    assert busy.wait_policy == "passive" and "busy" in busy.reasons["wait_policy"].text


@pytest.mark.parametrize(("memory", "kept"), [(64 * GIB, GIB), (4 * GIB, 256 * MIB), (64 * MIB, 32 * MIB)])
def test_malloc_keeps_at_most_a_share_of_memory(memory: int, kept: int) -> None:
    malloc = choose(replace(IDLE, memory=memory)).malloc
    assert malloc == {"MALLOC_MMAP_THRESHOLD_": kept, "MALLOC_TRIM_THRESHOLD_": kept, "MALLOC_ARENA_MAX": 1}


def test_old_glibc_gets_a_threshold_it_accepts() -> None:
    malloc = choose(replace(IDLE, allocator="glibc 2.31")).malloc
    assert (malloc["MALLOC_MMAP_THRESHOLD_"], malloc["MALLOC_TRIM_THRESHOLD_"]) == (32 * MIB, GIB)


@pytest.mark.parametrize("allocator", ["jemalloc", "another C library than glibc"])
def test_other_allocators_are_left_alone_and_named(allocator: str) -> None:
    chosen = choose(replace(IDLE, allocator=allocator))
    assert not chosen.malloc and allocator in chosen.reasons["malloc"].text


def test_malloc_of_the_user_is_left_alone() -> None:
    assert choose(config=RuntimeSettings(malloc="off")).reasons["malloc"].source == "config"
    for variable in ("MALLOC_TRIM_THRESHOLD_=1", "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1"):
        chosen = choose(environment=dict([variable.split("=", 1)]))
        assert not chosen.malloc and chosen.reasons["malloc"].source == "environment"
    assert "MALLOC_ARENA_MAX" not in choose(environment={"MALLOC_ARENA_MAX": "4"}).malloc


def test_environment_is_what_openmp_and_malloc_read() -> None:
    assert Runtime(3, "active", {"MALLOC_TRIM_THRESHOLD_": 5}).environment() == {
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "OMP_WAIT_POLICY": "active",
        "MALLOC_TRIM_THRESHOLD_": "5",
    }


def test_config_reads_a_bare_off_and_refuses_nonsense(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("runtime: {threads: 2, malloc: off, wait_policy: passive}")
    assert not load(file).runtime.tunes_malloc and load(file).runtime.threads == 2
    for wrong in ("threads: 0", "threads: many", "wait_policy: eager", "thread: 1"):
        file.write_text(f"runtime: {{{wrong}}}")
        with pytest.raises(SpecError, match="runtime"):
            load(file)


def fake(root: Path, **files: str) -> Machine:
    """A machine of 4 logical CPUs on 2 cores, and what `files` add or replace."""
    siblings = {
        f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 2},{i % 2 + 2}"
        for i in range(4)
    }
    known = siblings | {
        "proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-3\n",
        "proc/meminfo": "MemTotal:       1048576 kB\n",
        "proc/loadavg": "1.50 1.00 0.50 1/100 1",
        "sys/devices/system/cpu/online": "0-3\n",
    }
    for name, text in (known | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return read_machine(root=root)


def test_machine_without_limits_is_all_there(tmp_path: Path) -> None:
    machine = fake(tmp_path)
    assert (machine.cpus, machine.cores, machine.all_cores, machine.usable) == (4, 2, 2, 2)
    assert (machine.quota, machine.load, machine.memory) == (None, 1.5, GIB)


def test_affinity_counts_physical_cores(tmp_path: Path) -> None:
    machine = fake(tmp_path, **{"proc/self/status": "Cpus_allowed_list:\t1,3\n"})
    assert (machine.cpus, machine.cores, machine.all_cores) == (2, 1, 2)


def test_cgroup_2_limits_of_the_groups_around_count(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/job\n",
        "sys/fs/cgroup/slice/job/cpu.max": "max 100000\n",
        "sys/fs/cgroup/slice/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/slice/job/memory.max": str(256 * MIB),
        "sys/fs/cgroup/slice/memory.max": "max\n",
    }
    machine = fake(tmp_path, **files)
    assert (machine.quota, machine.usable, machine.memory) == (1.5, 1, 256 * MIB)


def test_cgroup_1_limits_of_a_container_count(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(512 * MIB),
    }
    machine = fake(tmp_path, **files)
    assert (machine.quota, machine.memory) == (2.0, 512 * MIB)
    (tmp_path / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    unlimited = read_machine(root=tmp_path)
    assert (unlimited.quota, unlimited.memory) == (None, GIB)


def test_preloaded_allocator_is_named(tmp_path: Path) -> None:
    line = "7f00-7f01 r-xp 0000 08:01 1 /usr/lib/x86_64-linux-gnu/libjemalloc.so.2\n"
    assert fake(tmp_path, **{"proc/self/maps": line}).allocator == "jemalloc"
