"""Memory of a GPU that is nobody's: what torch's allocator keeps for later is lost to other processes."""

import gc

import torch


def give_back(device: torch.device) -> None:
    """Return to the GPU what this process no longer uses, so that a server which wakes can have it."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
