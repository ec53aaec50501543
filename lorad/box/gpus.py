"""The GPUs of this machine, by NVML, and the ones that CUDA_VISIBLE_DEVICES leaves to this process."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from lorad.errors import SpecError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_SLICE = "MIG-"  # how the names of slices begin
_OTHERS = f"Name a whole GPU in {VISIBLE}, by its number or UUID; `{VISIBLE}= lorad …` uses the CPU"


class Gpu(NamedTuple):
    """A GPU of this machine, by its number of `nvidia-smi`; MIG may have split it into slices."""

    number: int
    label: str
    memory: int
    uuid: str
    is_split: bool


def bindings() -> Any:
    """Return NVML's functions, as nvidia-ml-py names them."""
    import pynvml

    return pynvml


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Yield the bindings, ready; None on a machine without NVIDIA's driver."""
    driver = bindings()
    try:
        driver.nvmlInit()
    except driver.NVMLError:
        yield None
        return
    try:
        yield driver
    finally:
        driver.nvmlShutdown()


def all_gpus() -> list[Gpu]:
    gpus = list[Gpu]()
    with nvml() as driver:
        for number in range(driver.nvmlDeviceGetCount() if driver else 0):
            handle = driver.nvmlDeviceGetHandleByIndex(number)
            try:
                is_split = bool(driver.nvmlDeviceGetMigMode(handle)[0])
            except driver.NVMLError:  # most GPUs cannot be split
                is_split = False
            label = str(driver.nvmlDeviceGetName(handle))
            memory = int(driver.nvmlDeviceGetMemoryInfo(handle).total)
            gpus.append(Gpu(number, label, memory, str(driver.nvmlDeviceGetUUID(handle)), is_split))
    return gpus


def visible_gpus() -> list[Gpu]:
    """List the whole GPUs that this process may have, in the order of CUDA_VISIBLE_DEVICES.

    That has numbers as `nvidia-smi` has them, UUIDs, or beginnings of UUIDs, up to the first that is none.
    Raises SpecError where there are GPUs, and none can be had: nobody would know why a run is on the CPU.
    """
    gpus = all_gpus()
    named = os.environ.get(VISIBLE)
    if named is None:
        whole = [gpu for gpu in gpus if not gpu.is_split]
        if gpus and not whole:
            raise _refused_split(gpus[0])
        return whole
    names = [name.strip() for name in named.split(",")]
    chosen: list[Gpu] = []
    for name in names:
        if gpus and name.startswith(_SLICE):
            problem = f"{name} is a slice of a GPU (MIG), and lorad leases whole ones"
            raise SpecError(problem, key=VISIBLE, hint=f"{_OTHERS}.")
        fitting = [gpu for gpu in gpus if name == str(gpu.number) or gpu.uuid.startswith(name)]
        if not name or len(fitting) != 1 or fitting[0] in chosen:
            break
        if fitting[0].is_split:
            raise _refused_split(fitting[0])
        chosen += fitting
    if gpus and not chosen and names[0] and not names[0].startswith("-"):
        listed = ", ".join(f"{gpu.number} ({gpu.uuid})" for gpu in gpus)
        raise SpecError(f"{names[0]} is none of {listed}", key=VISIBLE, hint=f"{_OTHERS}.")
    return chosen


def _refused_split(gpu: Gpu) -> SpecError:
    hint = f"`sudo nvidia-smi -i {gpu.number} -mig 0` makes it whole. {_OTHERS}."
    message = f"GPU {gpu.number} ({gpu.label}) is split into slices (MIG), and lorad leases whole ones"
    return SpecError(message, key=VISIBLE, hint=hint)
