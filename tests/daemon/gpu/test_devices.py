"""Devices: slots of a CPU, who else computes on a GPU,
and the notes by which daemons announce their leases.
"""

import inspect
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
from msgspec import structs

import lorad.box.gpus
from lorad.box.config import Config, DevicesConfig
from lorad.box.machine import Machine
from lorad.box.paths import Home
from lorad.box.runtime import Overrides, choose_runtime
from lorad.children.interpreter import InterpreterFinding
from lorad.cli.commands import doctor
from lorad.cli.commands.pools import device_row
from lorad.daemon.api.verbs.box import list_devices
from lorad.daemon.gpu import devices, lock_notes
from lorad.daemon.gpu.devices import Device, environment, find_devices, is_taken, lock_file
from lorad.daemon.gpu.lock_notes import holder_of, note_path, wanted_by_others
from lorad.daemon.gpu.occupancy import GpuProcess, Ours, Sight, read_all
from lorad.daemon.pool import setup_for
from lorad.daemon.pools.life import stop_pool
from lorad.daemon.queue.device_holders import held_in_words
from lorad.daemon.queue.place import place_runs
from lorad.daemon.serving.borrow_pool import hold_pool
from lorad.errors import Conflict, SpecError
from lorad.records import devices as answers
from lorad.records.devices import DeviceProcess, Lease
from lorad.spec.model import convert
from lorad.store import runs
from tests.kit.daemon_world import (
    finished,
    hold,
    open_context,
    reconciling,
    release,
    submit,
    until,
    until_state,
)
from tests.kit.fakes.gpu_kit import NO_QUERY, Gpu, Nvml, gpus, leave, me, note, taken

GPU = Device("cuda:0", "a GPU", 80 << 30, "GPU-0")
NOBODY = Ours((), b"LORAD_ATTEMPT=/nowhere/", frozenset())
MACHINE = Machine(cpus=8, cores=8, all_cores=8, quota=None, load=0.0, memory=1 << 34, allocator="glibc 2.36")


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(devices, "LOCKS", tmp_path / "locks")
    return tmp_path / "locks"


# -- slots ---------------------------------------------------------------------------------------------------
def test_config_sets_number_of_cpu_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    Nvml().install(monkeypatch)
    assert [device.name for device in find_devices()] == ["cpu"]
    assert [(device.name, device.kind) for device in find_devices(2)] == [("cpu:0", "cpu"), ("cpu:1", "cpu")]


def test_slots_split_cores_and_memory_between_pools() -> None:
    slots = [Device(f"cpu:{n}", "a CPU", 1 << 30) for n in range(2)]
    made = [
        setup_for(
            convert({}), Config(devices=DevicesConfig(2)), slot, model_path="/m", dtype="float32", threads=1
        )
        for slot in slots
    ]
    assert [(setup.device, setup.names) for setup in made] == [("cpu", ("cpu:0",)), ("cpu", ("cpu:1",))]
    assert made[0].key != made[1].key and made[0].memory_fraction == 0.425
    whole, half = (choose_runtime(10**9, MACHINE, "cpu", Overrides(), slots=slots) for slots in (1, 2))
    asked = choose_runtime(10**9, MACHINE, "cpu", Overrides(spec=7), slots=2)
    assert (whole.threads, half.threads, asked.threads) == (8, 4, 7)


@pytest.mark.system
async def test_two_bases_run_side_by_side_on_slots(home: Path) -> None:
    hold(home)
    async with reconciling(home) as ctx:
        ctx.gpus.devices[:] = [Device(f"cpu:{n}", "a CPU", 1 << 30) for n in range(2)]
        for name in ("one", "two"):
            submit(ctx, name, model=f"/models/{name}")
        await until(lambda: all(runs.get(ctx.store, name).state == "running" for name in ("one", "two")))
        told = {found.device: found for found in await list_devices(ctx, NO_QUERY)}
        assert [lease.why for n in range(2) if (lease := told[f"cpu:{n}"].lease)] == ["run one", "run two"]
        assert told["cpu:1"].pool == "two-1" and 0 <= (told["cpu:1"].utilization or 0.0) <= 1
        submit(ctx, "three", model="/models/three")
        waiting = await until(lambda: runs.get(ctx.store, "three").waiting)
        assert waiting.startswith(
            "0 of 2 devices free; pool one-1 is busy with run one; starts when it ends; pool two"
        )
        release(home)
        assert (await until_state(ctx, "three", "ended")).reason == "completed"


def test_pool_without_slots_blocks_every_cpu_slot(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "old")
    place_runs(ctx)
    ctx.gpus.devices[:] = [Device(f"cpu:{n}", "a CPU", 1 << 30) for n in range(2)]
    submit(ctx, "new", model="/models/other")
    place_runs(ctx)
    assert "pool tiny-1 is busy with run old" in runs.get(ctx.store, "new").waiting


@pytest.mark.parametrize(
    ("named", "chosen"),
    [
        (None, ["GPU-a", "GPU-b", "GPU-c"]),
        ("2,0", ["GPU-c", "GPU-a"]),
        ("GPU-b", ["GPU-b"]),
        ("GPU-c, 1", ["GPU-c", "GPU-b"]),
        ("1,7,0", ["GPU-b"]),
        ("1,1,0", ["GPU-b"]),
        ("", []),
        ("-1", []),
    ],
)
def test_only_visible_gpus_are_leased(
    monkeypatch: pytest.MonkeyPatch, named: str | None, chosen: list[str]
) -> None:
    Nvml(GPU_a=Gpu(), GPU_b=Gpu(), GPU_c=Gpu()).install(monkeypatch)
    if named is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    found = find_devices()
    assert [device.uuid for device in found if device.uuid] == chosen
    if chosen:
        assert [device.name for device in found] == [f"cuda:{n}" for n in range(len(chosen))]
        assert environment(found) == {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(chosen))
        assert find_devices() == found
    else:
        assert [device.name for device in found] == ["cpu"] and environment(found) == {}


MIG = "MIG-9f2c6e4a-0c7e-5e0f-a1a3-000000000000"


@pytest.mark.parametrize(
    ("named", "refused"),
    [
        (None, ""),
        ("1", ""),
        ("", ""),
        ("0", "GPU 0 (NVIDIA Fake) is split into slices (MIG), and lorad leases whole ones"),
        ("GPU-b,GPU-a", "GPU 0 (NVIDIA Fake) is split into slices"),
        (MIG, f"{MIG} is a slice of a GPU (MIG), and lorad leases whole ones"),
        (f"1,{MIG}", f"{MIG} is a slice of a GPU (MIG)"),
        ("7", "7 is none of 0 (GPU-a), 1 (GPU-b)"),
        ("GPU-", "GPU- is none of 0 (GPU-a), 1 (GPU-b)"),
    ],
)
def test_slices_of_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, named: str | None, refused: str) -> None:
    """A run would be on the CPU, and nobody would know why."""
    Nvml(GPU_a=Gpu(is_split=True), GPU_b=Gpu(is_split=False)).install(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    if not refused:
        assert [device.name for device in find_devices()] == ["cpu" if named == "" else "cuda:0"]
        return
    with pytest.raises(SpecError) as error:
        find_devices()
    assert error.value.message.startswith(f"CUDA_VISIBLE_DEVICES: {refused}")
    assert "Name a whole GPU in CUDA_VISIBLE_DEVICES" in error.value.hint
    assert ("sudo nvidia-smi -i 0 -mig 0" in error.value.hint) is refused.startswith("GPU 0")


def gpus_of_the_doctor() -> InterpreterFinding:
    return next(finding for finding in doctor._everything(Home(Path("/nowhere"))) if finding.name == "gpus")


def test_machine_of_slices_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Nvml(GPU_a=Gpu(is_split=True)).install(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(SpecError, match=r"GPU 0 .* is split into slices"):
        find_devices()
    found = gpus_of_the_doctor()
    assert not found.ok and "is split into slices" in found.detail and "-mig 0" in found.hint
    Nvml(GPU_a=Gpu(is_split=True), GPU_b=Gpu()).install(monkeypatch)
    assert gpus_of_the_doctor().detail == "NVIDIA Fake, 80.0 GiB; not GPU 0, which is split into slices (MIG)"


# -- other people --------------------------------------------------------------------------------------------
def test_fake_nvml_matches_real_signatures() -> None:
    for name, mine in vars(Nvml).items():
        if name.startswith(("nvml", "NVML")):
            real = getattr(pynvml, name)
            if callable(mine) and not inspect.isclass(mine):
                assert [*inspect.signature(mine).parameters][1:] == [*inspect.signature(real).parameters]
            else:
                assert mine == real or issubclass(real, Exception)


def seen(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, *refused: str, mine: Ours = NOBODY) -> str:
    nvml = Nvml(GPU_0=gpu).install(monkeypatch)
    nvml.refuses = {*refused}
    return read_all([GPU], mine)["GPU-0"].strangers(GPU)


LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")


def test_foreign_process_is_named_with_user_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen(monkeypatch, Gpu(computing=me()))
    assert (
        found.startswith("cuda:0 is in use by py")
        and f"(pid {os.getpid()}, " in found
        and "12.0 GiB" in found
    )
    assert seen(monkeypatch, Gpu(computing=me() | {1: None})).endswith(" and 1 more")
    assert seen(monkeypatch, Gpu()) == "" == seen(monkeypatch, Gpu(drawing=me(400 << 20)))
    assert "in use" in seen(monkeypatch, Gpu(drawing=me(2 << 30)))


def test_our_own_pools_are_not_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    family = replace(NOBODY, pids=(os.getppid(),))
    assert seen(monkeypatch, Gpu(computing=me()), mine=family) == ""
    hidden, ours = Gpu(computing={999_999_999: 1 << 30}), replace(NOBODY, devices=frozenset({"cuda:0"}))
    assert "cannot be seen from here (pid 999999999" in seen(monkeypatch, hidden)
    assert seen(monkeypatch, hidden, mine=ours) == ""


def test_unexplained_memory_counts_as_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = replace(NOBODY, devices=frozenset({"cuda:0"}))
    assert (
        seen(monkeypatch, Gpu(used=3 << 30))
        == "cuda:0 is in use by somebody who cannot be seen from here (3.0 GiB)"
    )
    assert seen(monkeypatch, Gpu(used=3 << 30), *LISTS).endswith("(3.0 GiB)")
    assert seen(monkeypatch, Gpu(used=600 << 20)) == "" == seen(monkeypatch, Gpu(used=3 << 30), mine=ours)


def test_unanswered_nvml_queries_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = (*LISTS, "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo_v2")
    assert seen(monkeypatch, Gpu(computing=me()), *refused) == ""
    assert seen(monkeypatch, Gpu(), "nvmlDeviceGetHandleByUUID").startswith("cuda:0 does not answer: ")
    assert seen(monkeypatch, Gpu(computing=me()), "nvmlInit") == ""


async def test_nothing_is_placed_beside_somebody_else(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml(GPU_0=Gpu(computing=me(), used=12 << 30, load=40)).install(monkeypatch)
    async with reconciling(home) as ctx:
        gpus(ctx, 1, monkeypatch, tmp_path)
        submit(ctx, "a")
        await until(lambda: "cuda:0 is in use by py" in runs.get(ctx.store, "a").waiting)
        (found,) = await list_devices(ctx, NO_QUERY)
        assert (found.utilization, found.memory_used, found.lease) == (0.4, 12 << 30, None)
        assert [(one.pid, one.ours) for one in found.processes] == [(os.getpid(), False)]
        nvml.gpus["GPU-0"] = Gpu()
        assert (await until_state(ctx, "a", "ended")).reason == "completed"


async def test_serving_refuses_a_gpu_with_strangers(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml(GPU_0=Gpu()).install(monkeypatch)
    async with reconciling(home) as ctx:
        gpus(ctx, 1, monkeypatch, tmp_path)
        run = finished(ctx)
        async with hold_pool(ctx, run) as pool:
            assert pool.setup.names == ("cuda:0",)
        stop_pool(ctx, pool)
        await until(lambda: not pool.process.is_up)
        nvml.gpus["GPU-0"], ctx.gpus.sights.seen = Gpu(computing=me()), {}
        with pytest.raises(Conflict, match="cuda:0 is in use by py"):
            async with hold_pool(ctx, run):
                pass


async def test_failing_bindings_are_reported_and_rarely_retried(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise ZeroDivisionError

    monkeypatch.setattr(lorad.box.gpus, "bindings", fail)
    async with reconciling(home) as ctx:
        gpus(ctx, 1, monkeypatch, tmp_path)
        submit(ctx, "a")
        await until(lambda: "cuda:0 does not answer: ZeroDivisionError" in runs.get(ctx.store, "a").waiting)
        assert len(calls) <= 2


# -- notes ---------------------------------------------------------------------------------------------------
def held() -> str:
    return held_in_words(GPU, holder_of(GPU))


def test_note_counts_only_while_lock_is_held(locks: Path, home: Path) -> None:
    leave(note_path(home, "GPU-0", "holder"), note())
    assert not is_taken(GPU) and holder_of(GPU) is None
    with taken(GPU):
        assert (found := holder_of(GPU)) is not None and (found.pool, found.why) == ("qwen-1", "run arith")
        user = f"(me, uid {os.getuid()}, run arith)"
        assert held() == f"cuda:0 held by pool qwen-1 {user}, free after 10m idle"


def test_holder_without_note_is_named_by_process(locks: Path, home: Path) -> None:
    with taken(GPU):
        assert held().startswith("cuda:0 is in use by another process or user (py")
        assert f"pid {os.getpid()}, " in held()


def test_note_from_a_non_holder_is_ignored(locks: Path) -> None:
    uid = os.getuid() + 4321
    path = leave(locks / f"GPU-0.holder-{uid}-00000000.json", note(uid=uid))
    with taken(GPU):
        assert holder_of(GPU) is None  # the file is not that user's
        if os.getuid() == 0:
            os.chown(path, uid, -1)
            assert holder_of(GPU) is None  # the lock is not that user's
            os.chown(leave(locks / "GPU-0.holder-0-00000000.json", note()), uid, -1)
            assert holder_of(GPU) is None  # anybody may choose a name


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"pool": 1}', b"[" * 5000, b'{"pool":"' + b"x" * 9000 + b'"}',
     json.dumps({"pool": "p", "uid": 0, "user": "", "why": "", "since": 1e300}).encode()],
)  # fmt: skip
def test_garbage_in_a_note_is_as_none(locks: Path, home: Path, data: bytes) -> None:
    lock_file(GPU)
    note_path(home, "GPU-0", "holder").write_bytes(data)
    with taken(GPU):
        assert holder_of(GPU) is None


def test_links_and_pipes_as_notes_never_block(locks: Path, home: Path) -> None:
    lock_file(GPU)
    there = leave(locks / "elsewhere", note())
    note_path(home, "GPU-0", "holder").symlink_to(there)
    os.mkfifo(locks / f"GPU-0.holder-{os.getuid()}-00000000.json")
    with taken(GPU):
        assert holder_of(GPU) is None
    os.mkfifo(locks / "GPU-9.lock")
    assert is_taken(Device("cuda:9", "", 1, "GPU-9"))


def test_what_others_wrote_is_shown_printable_and_short(locks: Path, home: Path) -> None:
    leave(note_path(home, "GPU-0", "holder"), note(pool="\x1b[2Jp\n", why="run " + "x" * 390))
    with taken(GPU):
        assert held().isprintable() and len(held()) < 320


def test_only_fresh_wanted_notes_of_others_count(locks: Path, home: Path) -> None:
    path = note_path(Path("/another"), "GPU-0", "wanted")
    lock_file(GPU)
    path.write_text(json.dumps({"uid": os.getuid(), "why": "run b", "since": 0.0}))
    assert wanted_by_others(home, {"GPU-0", "GPU-1"}) == {"GPU-0"} and not wanted_by_others(
        Path("/another"), {"GPU-0"}
    )
    for age in (lock_notes.FRESH_SECONDS + 5, -3600):
        os.utime(path, (time.time() - age,) * 2)
        assert not wanted_by_others(home, {"GPU-0"})


def test_lock_files_stay_shared_under_any_umask(locks: Path, home: Path) -> None:
    before = os.umask(0o077)
    try:
        path = lock_file(GPU)
        made = leave(note_path(home, "GPU-0", "holder"), note())
    finally:
        os.umask(before)
    assert path is not None
    assert [oct(file.stat().st_mode)[-4:] for file in (locks, path, made)] == ["1777", "0644", "0644"]
    assert sorted(file.name for file in locks.iterdir()) == sorted([path.name, made.name])


def test_a_process_says_who_it_is() -> None:
    assert (
        GpuProcess(7, "alice", "python", 12 << 30, True, False).in_words()
        == "python (pid 7, alice, 12.0 GiB)"
    )
    assert Sight(0.0).strangers(GPU) == ""


def test_device_table_shows_holder_and_other_processes() -> None:
    lease = Lease("p-1", 7, "alice", "run a", time.time() - 65, 600.0)
    process = DeviceProcess(9, "bob", "python", 1 << 30)
    row = answers.Device("cuda:0", "a GPU", memory_total=1, utilization=0.4)
    shown = device_row(
        structs.replace(row, lease=lease, processes=[process, structs.replace(process, ours=True)])
    )
    assert shown[4:8] == ("40%", "p-1", "alice", "1m05s")
    assert shown[8] == "run a, free after 10m00s idle; python (pid 9, bob, 1.0 GiB)"
    assert device_row(row)[5:] == ("", "", "", "")
