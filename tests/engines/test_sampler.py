"""The sampler: draws that are even, decided by seed and position, and follow the distribution asked for."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lorad.engines.builtin import sampler
from lorad.engines.builtin.sampler import Steps, draw, keys_of, mix, parameters_of, sample, uniforms
from lorad.protocol.batch import Sampling

MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_mix_is_splitmix64() -> None:
    values = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
    mixed = mix(torch.from_numpy(np.array(values, np.uint64).view(np.int64)))
    assert mixed.numpy().view(np.uint64).tolist() == [splitmix64(value) for value in values]
    # the first output of the published generator, seed 0
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_uniforms_are_even_and_uncorrelated() -> None:
    keys = mix(torch.arange(400))
    grid = uniforms(keys[:, None], torch.arange(50)[None, :])
    assert grid.min() >= 0 and grid.max() < 1
    counts = torch.histc(grid.float(), 20, 0, 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-square, 19 degrees of freedom, p < 0.001
    for axis in (0, 1):
        shifted = torch.roll(grid, 1, axis)
        assert abs(float(((grid - 0.5) * (shifted - 0.5)).mean())) * 12 < 0.03


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0, 0.0]]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.25, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(probabilities, uniform).tolist() == [1, 3, 3, 3]


def draws(logits: torch.Tensor, sampling: Sampling, count: int = 20000) -> tuple[torch.Tensor, torch.Tensor]:
    """(frequency, logprob) of each token; frequencies from `count` seeds."""
    keys, counts = keys_of(np.arange(count, dtype=np.uint64)), torch.zeros(count, dtype=torch.int64)
    steps, parameters = Steps.of([sampling]), parameters_of([sampling] * count)
    tokens, logprobs = sample(logits.expand(count, -1), keys, counts, parameters, steps)
    known = torch.full_like(logits, float("nan")).index_put((tokens,), logprobs)
    return torch.bincount(tokens, minlength=len(logits)) / count, known


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1), [0, 1, 2, 3, 4]),
        (Sampling(1, temperature=0.5), [0, 1, 2, 3, 4]),
        (Sampling(1, top_k=2), [0, 4]),
        (Sampling(1, top_p=0.6), [0, 4]),
        (Sampling(1, top_k=3, top_p=0.9), [0, 1, 4]),
        (Sampling(1, top_k=2, top_p=0.55), [0]),  # 0.46 of all mass, but 0.62 of what top_k leaves
        (Sampling(1, top_p=1e-6), [0]),
        (Sampling(1, temperature=0.0), [0]),
    ],
    ids=["plain", "cold", "top-k", "top-p", "top-k-then-top-p", "top-p-of-top-k", "tiny-top-p", "greedy"],
)
def test_tokens_follow_the_distribution_that_was_asked_for(sampling: Sampling, kept: list[int]) -> None:
    scaled = torch.log_softmax(LOGITS / (sampling.temperature or 1.0), -1)
    expected = torch.zeros(5).index_put((torch.tensor(kept),), scaled[kept].exp())
    frequency, logprobs = draws(LOGITS, sampling)
    assert (frequency - expected / expected.sum()).abs().max() < 0.012
    assert set(frequency.nonzero()[:, 0].tolist()) == set(kept)
    assert (logprobs[kept] - scaled[kept]).abs().max() < 1e-6  # before truncation


@pytest.fixture
def same_bits() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn() -> torch.Tensor:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 3
    return torch.stack([draws(logits, sampling)[0] for sampling in (Sampling(1), Sampling(1, top_p=0.7))])


class FloatSums(TorchDispatchMode):
    """Refuses what torch refuses on a GPU that is held to the same bits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.cumsum.default or not args[0].is_floating_point(), "sums of floats"
        return func(*args, **(kwargs or {}))


@pytest.mark.system
def test_sums_of_the_same_bits_are_of_integers(same_bits: None) -> None:
    with FloatSums():  # type: ignore[no-untyped-call]
        ours = drawn()
    torch.use_deterministic_algorithms(False)
    assert torch.equal(ours, drawn())
    test_a_token_of_probability_zero_is_never_drawn()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in float64, and few candidates."""
    monkeypatch.setattr(sampler, "_SUMS", {"cpu": torch.float64})
    monkeypatch.setattr(sampler, "CANDIDATES", 16)


def hard_logits() -> torch.Tensor:
    """Random ones of several temperatures, flat, with ties, of one word, and with words that cannot be."""
    rng = torch.Generator().manual_seed(0)
    rows = [torch.randn(300, generator=rng) * scale for scale in (0.0, 0.1, 1.0, 3.0, 10.0, 40.0)]
    rows += [torch.randn(300, generator=rng).mul(scale).round() for scale in (1, 2, 4)]
    rows += [torch.where(torch.arange(300) == 170, 100.0, 0.0)]
    rows += [torch.where(torch.arange(300) % 37 == 5, 1.0, float("-inf"))]
    rows += [torch.where(torch.arange(300) < 17, 5.0, 0.0), torch.where(torch.arange(300) > 283, 5.0, -9.0)]
    return torch.stack(rows)


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 2, 5, 15, 16, 17, 200, 1000])
def test_few_candidates_are_what_sorting_leaves(as_on_a_gpu: None, top_p: float, top_k: int) -> None:
    probabilities = torch.softmax(hard_logits(), -1)
    rows = len(probabilities)
    asked = torch.full((rows, 1), top_p), torch.full((rows, 1), float(top_k))
    left, words, is_whole = sampler.candidates(probabilities, *asked)
    sorted_ = sampler.truncate(probabilities, *asked)
    ours = torch.zeros_like(sorted_).scatter_(1, words, left)
    assert torch.equal(ours[is_whole], sorted_[is_whole])
    least = sorted_.masked_fill(sorted_ == 0, torch.inf).amin(-1)
    last = probabilities.sort(-1, descending=True).values[:, 15]
    assert torch.equal(is_whole, (least > last) & (top_k <= 16) | (last == 0))
    uniform = uniforms(keys_of(np.arange(rows, dtype=np.uint64)), torch.zeros(rows, dtype=torch.int64))
    tokens = words.gather(1, draw(left, uniform)[:, None])[:, 0]
    assert torch.equal(tokens[is_whole], draw(sorted_, uniform)[is_whole])


def test_words_drawn_by_blocks_are_the_same(as_on_a_gpu: None) -> None:
    probabilities = torch.softmax(hard_logits(), -1)
    for seed in range(200):
        keys = keys_of(np.arange(seed, seed + len(probabilities), dtype=np.uint64))
        uniform = uniforms(keys, torch.zeros_like(keys))
        assert torch.equal(sampler.draw_in_blocks(probabilities, uniform), draw(probabilities, uniform))
    edges = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0, 0.0]]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.25, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert sampler.draw_in_blocks(edges, uniform).tolist() == [1, 3, 3, 3]
