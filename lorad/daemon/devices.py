"""The devices of this machine. One slot for the CPU of a home; one for each GPU of the machine, locked by its UUID."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

LOCKS = Path(tempfile.gettempdir()) / "lorad-devices"


@dataclass(frozen=True)
class Device:
    """`name`: `cpu` or `cuda:<index>`; `label` for people; memory in bytes. `lock`: held by the pool that uses it."""

    name: str
    label: str
    memory_total: int
    uuid: str = ""

    @property
    def lock(self) -> Path | None:
        return LOCKS / f"{self.uuid}.lock" if self.uuid else None


def find_devices() -> list[Device]:
    """The GPUs; where there is none, the CPU."""
    return _gpus() or [Device("cpu", platform.processor() or platform.machine(), psutil.virtual_memory().total)]


def memory_used(device: Device) -> int:
    """Bytes in use by anybody."""
    if not device.uuid:
        memory = psutil.virtual_memory()
        return int(memory.total - memory.available)
    with _nvml() as nvml:
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(device.uuid)).used) if nvml else 0


def is_taken(device: Device) -> bool:
    """Some process on this machine, perhaps another user's, holds the device."""
    path = device.lock
    if path is None:
        return False
    _make_lock(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _make_lock(path: Path) -> None:
    """In a directory where everybody may make locks, a file that everybody may lock."""
    if not path.parent.is_dir():
        path.parent.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):
            path.parent.chmod(0o1777)
    if not path.exists():
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o644))


def _gpus() -> list[Device]:
    with _nvml() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())] if nvml else []
        return [
            Device(
                f"cuda:{index}",
                str(nvml.nvmlDeviceGetName(handle)),
                int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                str(nvml.nvmlDeviceGetUUID(handle)),
            )
            for index, handle in enumerate(handles)
        ]


@contextlib.contextmanager
def _nvml() -> Any:
    """The NVML bindings, ready; None on a machine without NVIDIA's driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
