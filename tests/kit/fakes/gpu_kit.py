"""GPUs that are not there: devices with locks of their own, and NVML as far as lorad calls it."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import lorad.box.gpus
from lorad.daemon.context import Context
from lorad.daemon.gpu import devices
from lorad.daemon.gpu.devices import Device, lock_file
from lorad.daemon.gpu.lock_notes import Holder, Notes, put
from lorad.daemon.process.users import Caller


def gpus(ctx: Context, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "LOCKS", tmp_path / "locks")
    ctx.gpus.devices[:] = [Device(f"cuda:{n}", "a GPU", 80 << 30, f"GPU-{n}") for n in range(count)]


NO_QUERY: Any = SimpleNamespace(  # of a request
    number=lambda key, default: default, caller=Caller(os.getuid(), "me")
)


@dataclass
class Gpu:
    """A fake GPU. computing, drawing: pid -> bytes, None where unknown."""

    computing: dict[int, int | None] = field(default_factory=dict)
    drawing: dict[int, int | None] = field(default_factory=dict)
    used: int = 0
    load: int = 0
    millijoules: int = 0  # since its driver was loaded
    is_split: bool | None = None  # into slices (MIG); None: a GPU that cannot be


class Nvml:
    """A stand-in for the module `pynvml`, with exactly what lorad uses of it. refuses: calls that are not
    permitted.
    """

    nvmlMemory_v2 = 0x02000028
    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    class NVMLLibraryMismatchError(Exception):
        pass

    def __init__(self, **gpus: Gpu) -> None:
        self.gpus = {uuid.replace("_", "-"): gpu for uuid, gpu in gpus.items()}
        self.refuses: set[str] = set()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "Nvml":
        monkeypatch.setattr(lorad.box.gpus, "bindings", lambda: self)
        return self

    def nvmlInit(self) -> None:
        self._check("nvmlInit")

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return list(self.gpus)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._check("nvmlDeviceGetHandleByUUID")
        return uuid

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA Fake"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetMigMode(self, device: str) -> list[int]:
        if (is_split := self.gpus[device].is_split) is None:
            raise self.NVMLError("nvmlDeviceGetMigMode: Not Supported")
        return [int(is_split), int(is_split)]

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: Any = None) -> SimpleNamespace:
        if version is not None:
            self._check("nvmlDeviceGetMemoryInfo_v2")
        return SimpleNamespace(total=80 << 30, used=self.gpus[handle].used)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self._check("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=self.gpus[handle].load, memory=0)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._check("nvmlDeviceGetTotalEnergyConsumption")
        return self.gpus[handle].millijoules

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._check("nvmlDeviceGetPowerUsage")
        return 350_500  # milliwatts

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        self._check("nvmlDeviceGetTemperature")
        return 61

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return self._listed("nvmlDeviceGetComputeRunningProcesses", lambda gpu: gpu.computing, handle)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return self._listed("nvmlDeviceGetGraphicsRunningProcesses", lambda gpu: gpu.drawing, handle)

    def _listed(
        self, call: str, of: Callable[[Gpu], dict[int, int | None]], handle: str
    ) -> list[SimpleNamespace]:
        self._check(call)
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in of(self.gpus[handle]).items()
        ]

    def _check(self, call: str) -> None:
        if call in self.refuses:
            raise self.NVMLError(f"{call}: Not Supported")


def me(memory: int | None = 12 << 30) -> dict[int, int | None]:
    """This process, which is no part of any pool, as NVML lists it."""
    return {os.getpid(): memory}


@contextmanager
def taken(device: Device) -> Iterator[None]:
    path = lock_file(device)
    assert path is not None
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def note(**changed: Any) -> Holder:
    return replace(
        Holder("qwen-1", os.getuid(), "me", "run arith", time.time(), idle_timeout=600.0), **changed
    )


def leave(path: Path, holder: Holder) -> Path:
    put(Notes(), path, holder)
    return path
