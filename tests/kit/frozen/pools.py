"""What pools and NVML would say in the frozen world."""

import hashlib
import json
import math
from pathlib import Path

import msgspec

from lorad.box.paths import AttemptDir, Home
from lorad.daemon.gpu.devices import Device
from lorad.daemon.gpu.occupancy import GpuProcess, Sight
from lorad.daemon.pool import Pool
from lorad.daemon.process.processes import Processes, ProcessState
from lorad.protocol.pool_setup import PoolSetup, ServerSetup
from lorad.protocol.status import Capacity, EngineStatus, PoolInfo, PoolStatus, TenantStatus, TrainerStatus
from lorad.protocol.traffic import FILE, Figures, Report
from lorad.store.pools import GrantRow, NodeRow
from tests.kit.frozen.runs import NOW, QWEN, TINY
from tests.kit.frozen.texts import hostile_log

GIB = 1 << 30
ANN = 1001
DEVICES = (
    Device("cuda:0", "NVIDIA H100 80GB HBM3", 80 * GIB, "GPU-00000000-0000-0000-0000-000000000000"),
    Device("cuda:1", "NVIDIA H100 80GB HBM3", 80 * GIB, "GPU-00000000-0000-0000-0000-000000000001"),
)
NODES = [
    NodeRow(
        node=name,
        cluster="auto",
        address=f"10.0.0.{number}",
        boot_id="",
        uid=ANN,
        devices=[f"{name}/cuda:{n}" for n in range(8)],
        bases=["/srv/models/Qwen3-32B", "/srv/models/Qwen3-8B"][:number],
        seen_at=NOW - 3600 * number,
        state=state,
    )
    for number, (name, state) in enumerate([("gpu-1", "free"), ("gpu-2", "free"), ("gpu-3", "lost")])
]
GRANT = GrantRow(
    pool="qwen3-32b-1",
    life=2,
    kind="ray",
    external="",
    state="lost",
    since=NOW - 7200,
    nodes=["gpu-2", "gpu-3"],
    detail="gpu-3 was not heard of for 35 s",
)
ALWAYS = math.inf  # monotonic: never looked at again
SIGHTS = {
    DEVICES[0].uuid: Sight(
        ALWAYS,
        int(71.4 * GIB),
        0.93,
        (
            GpuProcess(4711, "ann", "python", int(38.2 * GIB), True, True),
            GpuProcess(4712, "ann", "sglang::scheduler", int(33.2 * GIB), True, True),
        ),
        held=True,
    ),
    DEVICES[1].uuid: Sight(
        ALWAYS,
        int(41.1 * GIB),
        0.38,
        (
            GpuProcess(4720, "ann", "python", int(2.9 * GIB), True, True),
            GpuProcess(40122, "carol", "python", int(38.2 * GIB), True, False),
        ),
        held=True,
    ),
}


class Asleep(Processes):
    """Every process that was ever started is alive, and is nobody of this machine."""

    def inspect(self, attempt: AttemptDir) -> ProcessState:
        if not attempt.root.is_dir():
            return ProcessState("absent")
        parts = attempt.root.parts
        pool = {"qwen3-8b-1": 4711, "tiny-1": 4720}.get(parts[-3])
        digest = hashlib.sha256("/".join(parts[-3:]).encode()).digest()
        return ProcessState("alive", pool or 5000 + int.from_bytes(digest[:2], "big") % 2000)

    def watch(self, attempt: AttemptDir) -> int | None:
        return None


def pools(home: Home) -> list[Pool]:
    return [made(home, *qwen()), made(home, *tiny())]


def gateway(home: Home) -> None:
    """What is asked for through it."""
    (home.gateway / "attempts" / "0001").mkdir(parents=True)
    names = {
        "support": Figures(18_240, 3, 2, 4_100_000, 5.2, 1180.0, 0.084, 0.21, 0.92, 2.4),
        "canary": Figures(41, 0, 0, 9_300, 0.02, 4.5, 0.09, 0.12, 1.1, 1.3),
        "sorting": Figures(7, 0, 0, 60),
    }
    (home.gateway / FILE).write_bytes(msgspec.json.encode(Report(NOW - 26 * 3600, names)))


def made(home: Home, setup: PoolSetup, status: PoolStatus, ago: float) -> Pool:
    root = home.pool(setup.pool)
    attempt = AttemptDir(root / "attempts" / "0001")
    attempt.root.mkdir(parents=True)
    times: dict[str, float | None] = {
        "pid": status.info.pid,
        "shim_pid": status.info.pid - 1,
        "started_at": NOW - ago,
        "start_time": 1,
    }
    times |= {"shim_start_time": 1, "exit_code": None, "signal": None}
    attempt.status.write_text(json.dumps(times | {"boot_id": "", "ended_at": None}))
    attempt.log.write_bytes(b"pool: the base is loaded\n" + hostile_log())
    for name in ("engine-0.log", "trainer.log"):
        (Path(attempt.work) / name).write_bytes(b"INFO: 127.0.0.1 - GET /health 200\n" * 40 + hostile_log())
    return Pool(setup, root, ProcessState("alive", status.info.pid), status, polled_at=ALWAYS, guests=1)


def info(setup: PoolSetup, pid: int, **versions: str) -> PoolInfo:
    model = hashlib.sha256(setup.model.encode()).hexdigest()
    return PoolInfo(
        setup.pool,
        pid,
        setup.model,
        setup.model_path,
        model,
        setup.trainer,
        setup.engine,
        setup.mode,
        setup.device,
        setup.dtype,
        setup.threads,
        32768,
        versions,
        model,
        8_190_735_360,
    )


def qwen() -> tuple[PoolSetup, PoolStatus, float]:
    servers = ServerSetup(
        python="/opt/sglang/bin/python", max_rank=32, targets=("q_proj", "o_proj"), context_length=8192
    )
    setup = PoolSetup(
        pool="qwen3-8b-1",
        model=QWEN,
        model_path="/srv/models/Qwen3-8B",
        dtype="bfloat16",
        trainer="fsdp",
        engine="sglang",
        mode="timesliced",
        threads=8,
        device="cuda:0",
        deterministic=False,
        server=servers,
        owner=ANN,
    )
    runs = ("support-bot", "sample"), ("bold-lr", "train"), ("one-answer", "idle"), ("judge-fails", "sample")
    tenants = [
        TenantStatus(run, 1, phase, 43_646_976, 698_351_616, 3.5 * n) for n, (run, phase) in enumerate(runs)
    ]
    engine = EngineStatus(
        True, False, 96, 12, slots_used=6, slots=8, prefix_hits=0.71, cache_used=0.64, adapters_per_step=3.0
    )
    trainer = TrainerStatus(True, memory=38 * GIB, memory_peak=44 * GIB)
    loaded = [
        "support-bot@312",
        "support-bot@200",
        "support-v3@100",
        "bold-lr@118",
        "one-answer@88",
        "judge-fails@31",
    ]
    status = PoolStatus(
        info(setup, 4711, sglang="0.5.23", torch="2.13.0", **{"trainer.torch": "2.13.0"}),
        tenants,
        loaded,
        4211.0,
        9050.0,
        21 * GIB,
        0.0,
        engine,
        trainer,
        loaded[1:3],
        Capacity(8, 6, 32, 24 * GIB, 11 * GIB),
    )
    return setup, status, 26 * 3600.0


def tiny() -> tuple[PoolSetup, PoolStatus, float]:
    setup = PoolSetup(
        pool="tiny-1",
        model=TINY,
        model_path="/opt/lorad/models/tiny",
        dtype="float32",
        device="cuda:1",
        owner=ANN,
    )
    runs = ("sorter", "train", 2), ("million", "sample", 1), ("hanging", "sample", 1)
    tenants = [TenantStatus(run, attempt, phase, 92_160, 1_474_560, 0.4) for run, phase, attempt in runs]
    status = PoolStatus(
        info(setup, 4720, lorad="0.1.0", torch="2.13.0"),
        tenants,
        ["sorter@47", "million@245"],
        5180.0,
        11020.0,
        int(1.1 * GIB),
        0.0,
        EngineStatus(True, False, 64, 0, 2, 64, 0.92, 0.18),
        TrainerStatus(True, memory=3 * GIB),
        ["sorter@47"],
        Capacity(64, 2, 64, 6 * GIB, GIB // 8),
    )
    return setup, status, 5 * 3600.0
