"""Sums made on a device see every change of a weight."""

import hashlib

import pytest
import torch

from lorad.models import base
from lorad.models.base import add_to, sums


def weights(count: int = 1000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def seen(tensor: torch.Tensor) -> list[int]:
    return sums(tensor.contiguous().reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("at", [0, 1, 511, 999])
@pytest.mark.parametrize("bit", [0, 31])
def test_one_bit_is_seen(at: int, bit: int) -> None:
    changed = weights()
    changed.view(torch.int32)[at] ^= torch.tensor(-(1 << 31) if bit == 31 else 1, dtype=torch.int32)
    assert seen(changed)[:2] != seen(weights())[:2]


def test_moved_numbers_are_seen() -> None:
    whole = weights()
    for order in (whole.flip(0), whole.roll(2), whole.view(10, 100).t(), whole[torch.randperm(1000)]):
        assert seen(order) != seen(whole)
    swapped = whole.clone()
    swapped[[3, 501]] = whole[[501, 3]]
    assert seen(swapped) != seen(whole)


def test_length_counts_and_rests_too() -> None:
    zeros = [seen(torch.zeros(count, dtype=torch.bfloat16)) for count in range(9)]
    assert len({tuple(found) for found in zeros}) == 9
    odd = torch.arange(13, dtype=torch.bfloat16)
    changed = odd.clone()
    changed[12] = 0
    assert seen(odd) != seen(changed)


def test_parts_of_a_larger_tensor_are_like_others() -> None:
    whole = torch.arange(40, dtype=torch.bfloat16)
    for begin in range(1, 5):
        assert seen(whole[begin:]) == seen(whole[begin:].clone())


def test_portions_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = seen(weights(4099))
    monkeypatch.setattr(base, "_CHUNK", 64)
    assert seen(weights(4099)) == whole


def test_weights_of_a_cpu_are_hashed_whole() -> None:
    digest, expected = hashlib.sha256(), hashlib.sha256(weights().numpy().tobytes())
    add_to(digest, weights())
    assert digest.hexdigest() == expected.hexdigest()
