"""The devices of this machine: the slots of the CPU; or each GPU of the machine, locked by its UUID."""

import contextlib
import fcntl
import os
import platform
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from lorad.box import gpu_locks

_VISIBLE = "CUDA_VISIBLE_DEVICES"
LOCKS = gpu_locks.DIRECTORY


@dataclass(frozen=True)
class Device:
    """A GPU, or the CPU.

    name: `cuda:<index>`, `cpu`, or `cpu:<slot>` of a CPU with several slots.
    label: a name for people.
    memory_total: bytes.
    uuid: the UUID of a GPU; "" for a CPU.
    """

    name: str
    label: str
    memory_total: int
    uuid: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.name.partition(":")[0] == "cpu"

    @property
    def key(self) -> str:
        """Return what stays when GPUs are numbered otherwise: the UUID, or the name of a CPU slot."""
        return self.uuid or self.name

    @property
    def kind(self) -> str:
        """Name the hardware as torch does: all CPU slots are one CPU."""
        return "cpu" if self.is_cpu else self.name


def find_devices(cpu_slots: int = 1) -> list[Device]:
    """List the GPUs that CUDA_VISIBLE_DEVICES lets this process have, in its order; where there is none, the
    CPU, as many times as it has slots.
    """
    label, memory = platform.processor() or platform.machine(), psutil.virtual_memory().total
    names = ["cpu"] if cpu_slots == 1 else [f"cpu:{slot}" for slot in range(cpu_slots)]
    return _visible(_gpus()) or [Device(name, label, memory) for name in names]


def environment(devices: Sequence[Device]) -> dict[str, str]:
    """Make the variables with which CUDA numbers the GPUs in each process as lorad does: by UUID, whatever
    order NVML and CUDA have.
    """
    uuids = [device.uuid for device in devices if device.uuid]
    return {_VISIBLE: ",".join(uuids)} if uuids else {}


def _visible(gpus: list[Device]) -> list[Device]:
    """Choose those that CUDA_VISIBLE_DEVICES names: numbers as `nvidia-smi` has them, UUIDs, or beginnings of
    UUIDs. As CUDA does, it looks no further than a name that is none.
    """
    named = os.environ.get(_VISIBLE)
    if named is None:
        return gpus
    chosen: list[Device] = []
    for name in map(str.strip, named.split(",")):
        found = [gpu for number, gpu in enumerate(gpus) if name == str(number) or gpu.uuid.startswith(name)]
        if not name or len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return [replace(gpu, name=f"cuda:{number}") for number, gpu in enumerate(chosen)]


def lock_file(device: Device) -> Path | None:
    """The file whose lock holds the device, made if need be, in a directory where every user may make one."""
    if not device.uuid:
        return None
    return gpu_locks.make_lock(LOCKS, device.uuid)


def lock_directory() -> Path:
    return gpu_locks.make_directory(LOCKS)


def is_taken(device: Device) -> bool:
    """Check whether some process on this machine, perhaps another user's, holds the device.

    A lock that is no lock file counts as held.
    """
    path = lock_file(device)
    if path is None:
        return False
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return True
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return True
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def bindings() -> Any:
    """NVML, as nvidia-ml-py has it."""
    import pynvml

    return pynvml


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Yield the bindings, ready; None on a machine without NVIDIA's driver."""
    found = bindings()
    try:
        found.nvmlInit()
    except found.NVMLError:
        yield None
        return
    try:
        yield found
    finally:
        found.nvmlShutdown()


def _gpus() -> list[Device]:
    with nvml() as found:
        handles = (
            [found.nvmlDeviceGetHandleByIndex(i) for i in range(found.nvmlDeviceGetCount())] if found else []
        )
        return [
            Device(
                f"cuda:{index}",
                str(found.nvmlDeviceGetName(handle)),
                int(found.nvmlDeviceGetMemoryInfo(handle).total),
                str(found.nvmlDeviceGetUUID(handle)),
            )
            for index, handle in enumerate(handles)
        ]
