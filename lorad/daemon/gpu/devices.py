"""The devices of this machine: the slots of the CPU; or each GPU of the machine, locked by its UUID.

And shapes: what a run asks of a cluster, whose devices are known once they are granted.
"""

import fcntl
import os
import platform
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lorad.box import gpu_locks
from lorad.box.gpus import VISIBLE, visible_gpus
from lorad.protocol.nodes import NodesSetup

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


@dataclass(frozen=True)
class NodesShape(Device):
    """Nodes of a cluster with devices each. It stands for a device where a run is placed.

    name: `2 x 8 GPUs`, or `2 nodes` without any.
    nodes: how many, those for servers alone included.
    devices: GPUs on each; 0: ranks are on its processors.
    """

    nodes: int = 1
    devices: int = 0

    @property
    def is_cpu(self) -> bool:
        return not self.devices

    @property
    def kind(self) -> str:
        return "cuda:0" if self.devices else "cpu"

    @property
    def size(self) -> int:
        """Count the devices; a node without any is one."""
        return self.nodes * max(1, self.devices)


def shape_of(setup: NodesSetup) -> NodesShape:
    """Describe what a pool asks its cluster for."""
    nodes = setup.bundles
    gpus = setup.devices
    name = (
        f"{nodes} x {gpus} GPU{'' if gpus == 1 else 's'}"
        if gpus
        else f"{nodes} node{'' if nodes == 1 else 's'}"
    )
    return NodesShape(name, "nodes of the cluster", 0, nodes=nodes, devices=gpus)


def find_devices(cpu_slots: int = 1) -> list[Device]:
    """List the GPUs that CUDA_VISIBLE_DEVICES lets this process have, in its order; on a machine without any,
    or where it hides all, the CPU, as many times as it has slots.

    Raises SpecError as `visible_gpus` does.
    """
    if gpus := visible_gpus():
        return [Device(f"cuda:{n}", gpu.label, gpu.memory, gpu.uuid) for n, gpu in enumerate(gpus)]
    label = platform.processor() or platform.machine()
    memory = psutil.virtual_memory().total
    names = ["cpu"] if cpu_slots == 1 else [f"cpu:{slot}" for slot in range(cpu_slots)]
    return [Device(name, label, memory) for name in names]


def environment(devices: Sequence[Device]) -> dict[str, str]:
    """Make the variables with which CUDA numbers the GPUs in each process as lorad does: by UUID, whatever
    order NVML and CUDA have.
    """
    uuids = [device.uuid for device in devices if device.uuid]
    return {VISIBLE: ",".join(uuids)} if uuids else {}


def lock_file(device: Device) -> Path | None:
    """Make the file whose lock holds the device, if need be, where every user may make one."""
    if not device.uuid:
        return None
    return gpu_locks.make_lock(LOCKS, device.uuid)


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
