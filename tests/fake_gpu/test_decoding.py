"""Steps of decoding on the fake device: captured, one read each, and no more kernels than today."""

from collections import Counter

import numpy as np
import pytest
import torch

from lorad.engines.builtin.prefix import PrefixCache
from lorad.engines.builtin.sampler import CANDIDATES
from lorad.engines.builtin.steps import GraphedSteps
from lorad.trainers.builtin import routes
from tests.fake_gpu.cuda import fake_gpu
from tests.fake_gpu.device import FakeGpu
from tests.fake_gpu.scenes import (
    PLAIN,
    base_of,
    batch_of,
    call,
    config,
    even_experts,
    finish,
    mixture,
    version,
)

STEPS = 6
SAMPLING = 49  # kernels of sampling and of the ends of rows
A_LAYER = {100: 29, 300: 48}  # most kernels of a layer with an adapter, by tokens of a prompt: 256 are shared
SECOND_ADAPTER = 12  # kernels of a layer more
COPIES_OF_OWNERS = 4  # of whose a row's adapter and shared prompt are, when rows have come


def assert_fused(gpu: FakeGpu) -> None:
    """Hold all attention to kernels that neither keep all scores nor build plans."""
    assert {way.kernel for way in gpu.attentions} <= {"flash", "efficient"}, gpu.attentions
    assert not gpu.plans


@pytest.mark.system(but="1-100")
@pytest.mark.parametrize("prompt", A_LAYER)
@pytest.mark.parametrize("adapters", [1, 2])
def test_a_step_is_captured_and_read_once(prompt: int, adapters: int) -> None:
    with fake_gpu() as gpu:
        base = base_of(config())
        batch = batch_of(base)
        calls = [call(version(base, name), [4, 4], prompt, STEPS) for name in "ab"[:adapters]]
        gpu.forget()
        finish(batch, calls)
        replays = sum(graph.replays for graph in gpu.graphs)
        assert replays >= STEPS - 1
        assert len(gpu.reads) <= replays + adapters, Counter(read.place for read in gpu.reads)
        assert not gpu.writes, Counter(write.place for write in gpu.writes)  # admissions have pinned memory
        assert len(gpu.sent) <= 3 * adapters + COPIES_OF_OWNERS
        most = max(sum(graph.kernels.values()) for graph in gpu.graphs)
        layer = A_LAYER[prompt] + SECOND_ADAPTER * (adapters - 1)
        assert most <= SAMPLING + len(base.layers) * layer
        assert_fused(gpu)


@pytest.mark.system(but="experts-90")
@pytest.mark.parametrize(("adapted", "capability"), [("", 90), ("attention", 90), ("experts", 90), ("", 89)])
def test_a_step_of_a_mixture_is_fused(adapted: str, capability: int) -> None:
    """And captured, where torch's grouped product needs no sizes on the host."""
    with fake_gpu(capability=capability) as gpu:
        base = base_of(mixture())
        gpu.fill = even_experts(gpu)
        held = version(base, "a", only="self_attn" if adapted == "attention" else "") if adapted else PLAIN
        gpu.forget()
        finish(batch_of(base), [call(held, [4, 4], 100, STEPS)])
        assert_fused(gpu)
        replays = sum(graph.replays for graph in gpu.graphs)
        assert replays >= STEPS - 1 if capability == 90 else not replays


@pytest.mark.system
@pytest.mark.parametrize("adapters", [1, 2])
def test_steps_read_adapters_on_experts(adapters: int) -> None:
    """Captured, and read once; what a version that has gone was read by goes with it."""
    with fake_gpu() as gpu:
        base = base_of({**mixture(), "num_hidden_layers": 1})
        gpu.fill = even_experts(gpu)
        batch = batch_of(base)
        helds = [version(base, name) for name in "ab"[:adapters]]
        gpu.forget()
        finish(batch, [call(held, [4, 4], 100, STEPS) for held in helds])
        replays = sum(graph.replays for graph in gpu.graphs)
        assert replays >= STEPS - 1
        assert len(gpu.reads) <= replays + adapters, Counter(read.place for read in gpu.reads)
        assert isinstance(batch.stepper, GraphedSteps) and batch.stepper.graphs
        assert len(batch.stepper.banks) == adapters - 1  # one alone is not copied
        for held in helds:
            batch.stepper.forget(held.lora)
        assert len(batch.stepper.graphs) == 0 or adapters == 2


@pytest.mark.system
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 20},
        {"top_k": 20, "top_p": 0.8, "temperature": 0.5},
    ],
)
def test_every_way_of_sampling_is_captured(sampling: dict[str, float]) -> None:
    with fake_gpu() as gpu:
        base = base_of(config(num_hidden_layers=1))
        finish(batch_of(base), [call(version(base, "a"), [3, 2], 100, STEPS, **sampling)])
        assert sum(graph.replays for graph in gpu.graphs) >= STEPS - 1


@pytest.mark.system
@pytest.mark.parametrize("prompt", [200, 400])
def test_prompts_begin_with_tokens_of_earlier_ones(prompt: int) -> None:
    with fake_gpu() as gpu:
        base = base_of(config(num_hidden_layers=1))
        held = version(base, "a")
        batch = batch_of(base, prefixes=PrefixCache(1 << 28))
        for tokens in (prompt, prompt + 30):
            finish(batch, [call(held, [3, 2], tokens, STEPS)])
        assert_fused(gpu)


@pytest.mark.system
def test_routes_of_a_mixture_are_kept() -> None:
    with fake_gpu() as gpu:
        base = base_of({**mixture(), "num_hidden_layers": 1})
        gpu.fill = even_experts(gpu)
        held = version(base, "a", only="self_attn")
        finish(batch_of(base), [call(held, [3, 2], 100, STEPS, routes=True)])
        assert sum(graph.replays for graph in gpu.graphs) >= STEPS - 1
        assert routes.experts_met(base, np.arange(4, 20), np.arange(20, 30))


@pytest.mark.system
def test_rows_without_room_wait_for_their_turn() -> None:
    with fake_gpu():
        base = base_of(config(num_hidden_layers=1))
        finish(batch_of(base, cache=256 * 400), [call(version(base, "a"), [4, 4], 100, 12)])
        finish(batch_of(base, rows=3), [call(version(base, "a"), [4, 4], 100, STEPS)])


@pytest.mark.system
def test_a_base_in_float32_decodes() -> None:
    with fake_gpu() as gpu:
        base = base_of(config(num_hidden_layers=1), torch.float32)
        finish(batch_of(base), [call(version(base, "a"), [3, 2], 100, STEPS)])
        assert gpu.graphs


@pytest.mark.system
def test_no_step_sorts_the_vocabulary() -> None:
    with fake_gpu() as gpu:
        base = base_of(config(vocab_size=32768))
        rows = 8
        finish(batch_of(base), [call(version(base, "a"), [4, 4], 100, STEPS, top_p=0.9)])
        assert sum(graph.replays for graph in gpu.graphs) >= STEPS - 1
        assert gpu.sorted == rows * CANDIDATES


@pytest.mark.system
def test_steps_of_earlier_calls_are_captured_once() -> None:
    with fake_gpu() as gpu:
        base = base_of(config(num_hidden_layers=1))
        batch = batch_of(base, cache=1 << 28)
        captured = []
        for step in range(2):
            held = version(base, f"a{step}")
            for prompt, counts in ((300, [8]), (100, [1] * 4)):  # without shared prompts in between
                gpu.forget()
                finish(batch, [call(held, counts, prompt + n, 4 + 2 * n + step) for n in range(3)])
                captured.append(len(gpu.graphs))
        assert captured == [3, 3, 3, 0]  # longer prompts to share have moved
