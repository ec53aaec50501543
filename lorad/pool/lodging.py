"""How much a pool may take of a GPU on which others have memory: what was free when the pool began.

lorad starts no pool beside a program that computes. Programs that only draw, and little memory that nobody
is seen to have, are no obstacle; this keeps a pool from growing into what they do not use at the moment.
"""

import logging
import time
from collections.abc import Sequence

import torch
from msgspec.structs import replace

from lorad.protocol.pool_setup import PoolSetup
from lorad.text import size

log = logging.getLogger(__name__)

_SECONDS = 5.0  # for the memory of what was there before to be given back
_LOOK_SECONDS = 0.5
_CONTEXT = 512 << 20  # bytes that CUDA takes of a GPU beside what torch allocates
_LEAST = 0.01


def within_what_is_free(config: PoolSetup) -> PoolSetup:
    """Lower the share of its GPUs that a pool takes to what is free there now, and hold torch to it.

    Where NVML does not say what is free, and for GPUs of other machines, the setup stays as it is.
    """
    if config.device == "cpu" or config.nodes is not None:
        return config
    gpus = config.devices or (config.device,)
    free = _free_share(gpus)
    deadline = time.monotonic() + _SECONDS
    while free is not None and free < config.memory_fraction and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        free = _free_share(gpus)
    if free is None:
        return config
    lodges = free < config.memory_fraction
    if lodges:
        log.warning(
            "%s: others have memory there; the pool takes %.0f%% of it at most, which was free, instead of "
            "%.0f%% (pool.memory_fraction)",
            ", ".join(gpus), 100 * free, 100 * config.memory_fraction,
        )  # fmt: skip
    if not config.has_ranks and (lodges or config.server is None):
        has_servers = config.server is not None and not config.server.urls
        shared = has_servers and config.mode == "resident"  # the servers have the other half
        for gpu in config.trainer_names:
            torch.cuda.set_per_process_memory_fraction(free / 2 if shared else free, torch.device(gpu))
    return replace(config, memory_fraction=free) if lodges else config


def _free_share(gpus: Sequence[str]) -> float | None:
    """Read which part of the fullest GPU is free for torch; None where NVML does not say."""
    import pynvml

    shares: list[float] = []
    try:
        pynvml.nvmlInit()
        for uuid in uuids_of(gpus):
            memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid))
            log.debug("%s: %s of %s in use", uuid, size(memory.used), size(memory.total))
            shares.append((memory.total - memory.used - _CONTEXT) / memory.total)
    except pynvml.NVMLError as error:
        log.warning("what is free on %s is not known: %s", ", ".join(gpus), error)
        return None
    return max(_LEAST, min(shares))


def uuids_of(gpus: Sequence[str]) -> list[str]:
    """Return the UUIDs of GPUs as NVML has them."""
    properties = [torch.cuda.get_device_properties(torch.device(gpu)) for gpu in gpus]
    return [f"GPU-{getattr(device, 'uuid', '')}" for device in properties]
