"""The GPUs of an agent's node, which it locks by UUID before anything starts, and its network."""

import ipaddress
import re
import socket
from collections.abc import Sequence

import psutil

from lorad.box import gpu_locks
from lorad.errors import Conflict, SpecError

_UUID = re.compile(r"(GPU|MIG)-[A-Za-z0-9-]+")


def take_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Lock GPUs, named by UUIDs or by `nvidia-smi`'s indices, for the life of this process; returns their
    UUIDs.

    Raises SpecError for a GPU that is not there, Conflict for one that another process holds.
    """
    uuids = []
    for device in devices:
        if device.isdigit():
            import pynvml

            try:
                pynvml.nvmlInit()
                uuid = str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(int(device))))
            except pynvml.NVMLError as error:
                raise SpecError(f"GPU {device} was granted, but is not there: {error}") from error
        elif _UUID.fullmatch(device):
            uuid = device
        else:
            raise SpecError(f"{device!r} is no GPU: neither an index nor a UUID")
        uuids.append(uuid)
    for uuid in uuids:
        try:
            gpu_locks.take_lock(gpu_locks.DIRECTORY, uuid)
        except BlockingIOError:
            raise Conflict(
                f"GPU {uuid} is held by another process there",
                hint="It is used by lorad on that machine, or by another pool: give it to one of them.",
            ) from None
    return tuple(uuids)


def memory_of(uuids: Sequence[str]) -> tuple[int, ...]:
    """Return the bytes of each GPU; () where the driver does not say."""
    if not uuids:
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        return tuple(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)
    except pynvml.NVMLError:
        return ()


def interface_of(address: str) -> str:
    """Return the network interface that has an IP; "" when there is none."""
    ip = ipaddress.ip_address(address)
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                own = ipaddress.ip_address(entry.address.partition("%")[0])
                if own == ip or (own.is_loopback and ip.is_loopback):
                    return name
    return ""
