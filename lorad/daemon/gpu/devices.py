"""The devices of this machine: each GPU, locked by its UUID, or the slots of the CPU.

A shape stands for what a run asks of a cluster, whose devices are known once they are granted.
"""

import fcntl
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lorad.box import gpu_locks
from lorad.box.gpus import VISIBLE, visible_gpus
from lorad.files import open_file
from lorad.protocol.nodes import NodesSetup
from lorad.text import counted

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
        """Return the UUID, which stays when GPUs are numbered otherwise, or the name of a CPU slot."""
        return self.uuid or self.name

    @property
    def kind(self) -> str:
        """Name the hardware as torch does: all CPU slots are one CPU."""
        return "cpu" if self.is_cpu else self.name


@dataclass(frozen=True)
class NodesShape(Device):
    """Nodes of a cluster with devices each, which stand for one device where a run is placed.

    name: `2 x 8 GPUs`, or `2 nodes` without any.
    nodes: how many, those for servers alone included.
    devices: GPUs on each; 0 where ranks are on processors.
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
    name = counted(nodes, "node")
    if gpus:
        name = f"{nodes} x {gpus} GPU{'' if gpus == 1 else 's'}"
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
    """Make the variables that have CUDA number the GPUs as lorad does, whatever its own order."""
    uuids = [device.uuid for device in devices if device.uuid]
    return {VISIBLE: ",".join(uuids)} if uuids else {}


def lock_file(device: Device) -> Path | None:
    """Make the file whose lock holds a GPU, unless it is there; None for a CPU. Every user may make one."""
    return gpu_locks.make_lock(LOCKS, device.uuid) if device.uuid else None


def is_taken(device: Device) -> bool:
    """Check whether a process holds the device; anything but a lock file in its place counts as held."""
    path = lock_file(device)
    if path is None:
        return False
    try:
        file = open_file(path, links=False)
    except OSError:
        return True
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
