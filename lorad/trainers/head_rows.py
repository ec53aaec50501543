"""How many rows of logits any trainer makes at a time: a whole sequence's would not fit beside the model."""

import torch

LOGITS = 2**22
ROWS = 128
"""A chunk of logits on a CPU has LOGITS numbers (16 MiB in fp32, of which two live at a time), but at least
ROWS rows. Fewer would read the whole head too often: with 152 k words, 27 rows take 1.5 times as long as 128,
which are 74 MiB."""

_GPU_LOGITS = 2**27  # A chunk of logits on a GPU: 512 MiB in fp32


def rows_at_once(columns: int, device: torch.device) -> int:
    """Return how many rows a chunk has where this rank computes the scores of so many words."""
    if device.type == "cuda":
        return max(1, _GPU_LOGITS // columns)
    return max(ROWS, LOGITS // columns)
