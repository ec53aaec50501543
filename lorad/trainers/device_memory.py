"""Gives memory of a GPU back that torch's allocator would keep, which is lost to other processes."""

import gc

import torch


def give_back(device: torch.device) -> None:
    """Return to the GPU what this process no longer uses, so that a waking server can have it."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
