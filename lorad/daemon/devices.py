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
    """`name`: `cpu` or `cuda:<index>`; `label` for people; memory in bytes. `uuid`: of a GPU."""

    name: str
    label: str
    memory_total: int
    uuid: str = ""


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


def lock_file(device: Device) -> Path | None:
    """The file whose lock holds the device, made if need be, in a directory where every user may make one."""
    if not device.uuid:
        return None
    path = LOCKS / f"{device.uuid}.lock"
    if not path.parent.is_dir():
        path.parent.mkdir(exist_ok=True)
        path.parent.chmod(0o1777)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o644))
    return path


def is_taken(device: Device) -> bool:
    """Some process on this machine, perhaps another user's, holds the device."""
    path = lock_file(device)
    if path is None:
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


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
