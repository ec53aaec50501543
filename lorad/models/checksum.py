"""A checksum of frozen weights, to see that nobody wrote to them.

On a CPU it is of their bytes. A GPU's weights are not copied to the host for it, which would take seconds in
which other runs wait: sums are made on the device, of integers, so that no order changes them.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hashlib import _Hash

_CHUNK = 1 << 22  # numbers that are widened at once
_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64))  # as int64


def add_to(digest: "_Hash", tensor: torch.Tensor) -> None:
    """Add the numbers of a tensor to a digest, bit for bit."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        digest.update(flat.numpy().data)
        return
    for number in sums(flat):
        digest.update(number.to_bytes(8, "little", signed=True))


def sums(flat: torch.Tensor) -> list[int]:
    """Return two weighted sums of bytes (uint8 [n]) and their number; the sums are of integers modulo 2^64.

    Whatever changes a byte or moves it changes them, but for a chance of about 2^-64.
    """
    count = flat.numel()
    if (
        flat.storage_offset() % 8
    ):  # a part of a larger tensor: words have to begin at a multiple of their size
        flat = flat.clone()
    whole = count // 8 * 8
    words = flat[:whole].view(torch.int64)
    rest = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    rest[: count - whole] = flat[whole:]
    totals = torch.zeros(2, dtype=torch.int64, device=flat.device)
    parts = [*words.split(_CHUNK), rest.view(torch.int64)]
    begin = 0
    for part in parts:
        place = torch.arange(begin + 1, begin + 1 + len(part), device=flat.device)
        begin += len(part)
        for which, odd in enumerate(_ODD):
            mixed = (part ^ (part >> 29)) * odd + place * _ODD[1 - which]
            totals[which] += ((mixed ^ (mixed >> 32)) * odd).sum()
    return [*totals.tolist(), count]
