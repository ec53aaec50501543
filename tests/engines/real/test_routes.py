"""Routes that a real server says: the builtin engine's of the same tokens, in fp32."""

import asyncio

import numpy as np
import pytest
import torch

from lorad.engines.base import BASE, AdapterSource, Engine
from lorad.engines.remote.engine import RemoteEngine
from lorad.models.attention import CausalAttention
from lorad.models.base import Base
from lorad.models.decoder import hidden
from lorad.models.experts import Recording, route_shape
from lorad.models.loading import load_base
from lorad.models.lora import FrozenLora
from lorad.protocol.batch import Chunk, Prompt, Sampling
from lorad.routes import is_unknown
from tests.conformance.engine_suite import whole
from tests.conformance.expert_adapters import BATCH, MOE, adapter_of
from tests.engines.real.test_whole_run import FEW, MOE_DEMO, configure
from tests.kit.world import world

pytestmark = pytest.mark.parametrize("kind", ["sglang"], indirect=True)
NAMES = (BASE, "experts", "attention")


@pytest.fixture(scope="module")
def server(mixture: RemoteEngine) -> RemoteEngine:
    return mixture


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base(MOE, torch.float32, torch.device("cpu"))


async def loaded(engine: Engine, name: str) -> str:
    if name == BASE:
        return name
    adapter = adapter_of(name)
    await engine.load(f"{name}@1", AdapterSource(adapter.digest(), adapter=adapter))
    return f"{name}@1"


@torch.no_grad()
def ours(base: Base, name: str, tokens: np.ndarray) -> np.ndarray:
    adapter = None if name == BASE else adapter_of(name)
    lora = None if adapter is None else FrozenLora(base, adapter.tensors, adapter.config.scale)
    shape = route_shape(base)
    assert shape is not None
    recording, ids = Recording(shape), torch.from_numpy(tokens.astype(np.int64))
    hidden(base, ids[None], torch.arange(len(ids)), CausalAttention(), lora, routing=recording)
    return recording.routes()


async def sampled(engine: Engine, version: str, prompt: np.ndarray) -> dict[int, Chunk]:
    how = Sampling(12, temperature=1.0, stream=False, routes=True)
    wanted = [Prompt("0", prompt, np.arange(3, dtype=np.uint64))]
    chunks = [chunk async for chunk in engine.generate(f"r {version}", version, wanted, how)]
    return {index: chunk for (_, index), chunk in whole(chunks).items()}


async def test_sampled_tokens_have_their_routes(engine: Engine, base: Base) -> None:
    """Of several versions at once, whose prompts are cached the second time."""
    prompt = np.arange(5, 45, dtype=np.int32)
    versions = [await loaded(engine, name) for name in NAMES]
    for _ in range(2):
        found = await asyncio.gather(*(sampled(engine, version, prompt) for version in versions))
        for name, samples in zip(NAMES, found, strict=True):
            assert sorted(samples) == [0, 1, 2]
            for index, chunk in samples.items():
                assert chunk.routes is not None
                expected = ours(base, name, np.concatenate([prompt, chunk.tokens[:-1]]))
                assert np.array_equal(chunk.routes[:-1], expected[len(prompt) * (index > 0) :])
                assert is_unknown(chunk.routes[-1:]).all()


async def test_scored_tokens_have_their_routes(engine: Engine, base: Base) -> None:
    for name in NAMES:
        version = await loaded(engine, name)
        (said,) = await engine.routed_scores(version, BATCH)
        assert np.allclose(said.logprobs, await engine.score(version, BATCH), atol=1e-5)
        assert said.routes is not None
        start = at = 0
        for prompt, completions in BATCH.groups():
            for number, completion in enumerate(completions):
                expected = ours(base, name, np.concatenate([prompt, completion]))
                read = len(completion) - 1
                assert np.array_equal(said.routes.completions[at : at + read], expected[len(prompt) : -1])
                if number == 0:
                    known = said.routes.prompts[start : start + len(prompt)]
                    assert np.array_equal(known, expected[: len(prompt)])
                at += len(completion)
            start += len(prompt)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_a_run_replays_the_routes_of_its_server(kind: str, dtype: str) -> None:
    """In bfloat16 without being asked."""
    how = ["model.dtype=bfloat16"] if dtype == "bfloat16" else ["rollout.routes=record"]
    with world() as made:
        configure(made, kind)
        overrides = (f"rollout.backend={kind}", *FEW, *how)
        made.lorad("run", MOE_DEMO, *overrides, "--name", "moe", "--detach")
        made.completed("moe")
        steps = made.client.steps("moe")
        assert {step.metrics["routes_unknown"] for step in steps} == {0.0}
        differ = max(step.metrics["routes_differ"] or 0.0 for step in steps)
        assert differ == 0 if dtype == "float32" else 0 < differ < 0.3
        attested = [version.attested for version in made.client.adapters("moe")]
        assert len(attested) == 3 and set(attested) <= {"passed", "inconclusive"}
        assert set(attested) == {"passed"} or dtype == "bfloat16"
