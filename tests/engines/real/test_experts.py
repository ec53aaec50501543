"""Adapters on the experts of a mixture, in the servers' own loaders: each is what its merged model has."""

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest

from lorad.engines.base import BASE, AdapterSource, Engine
from lorad.engines.remote import holdings
from lorad.engines.remote.engine import RemoteEngine
from tests.conformance.expert_adapters import ADAPTERS, BATCH, MOE, adapter_of, merged_logprobs
from tests.conformance.reference import reference_logprobs, reference_model

_numbers = itertools.count(1)
TOLERANCE = 1e-4  # nats, fp32


@pytest.fixture(scope="module")
def server(mixture: RemoteEngine) -> RemoteEngine:
    return mixture


@pytest.fixture(scope="module")
def base() -> np.ndarray:
    found: np.ndarray = reference_logprobs(reference_model(MOE), BATCH).detach().numpy()
    return found


async def loaded(engine: Engine, name: str) -> str:
    adapter = adapter_of(name)
    version = f"{name}@{next(_numbers)}"
    await engine.load(version, AdapterSource(adapter.digest(), adapter=adapter))
    return version


async def test_base_of_a_mixture_is_that_of_transformers(engine: Engine, base: np.ndarray) -> None:
    assert np.abs(await engine.score(BASE, BATCH) - base).max() < TOLERANCE


@pytest.mark.parametrize("name", ADAPTERS)
async def test_adapters_of_experts_equal_merged_models(
    engine: Engine, base: np.ndarray, tmp_path: Path, name: str
) -> None:
    expected = merged_logprobs(adapter_of(name), tmp_path / "merged")
    found = await engine.score(await loaded(engine, name), BATCH)
    assert np.abs(found - expected).max() < TOLERANCE
    wanted = expected - base
    assert np.abs(wanted).mean() > 0.1
    assert ((found - base) * wanted).sum() / (wanted**2).sum() == pytest.approx(1, abs=1e-4)


async def test_mixed_adapters_of_experts_keep_apart(engine: Engine) -> None:
    names = [BASE, *[await loaded(engine, name) for name in ("experts", "attention", "one-expert")]]
    alone = [await engine.score(name, BATCH) for name in names]
    mixed = await asyncio.gather(*(engine.score(name, BATCH) for name in names))
    for found, expected in zip(mixed, alone, strict=True):
        assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", ["low-rank-experts", "low-rank-rslora"])
async def test_vllm_reads_plain_exports_exactly(
    kind: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Files of a version as they are, whose experts have another rank: SGLang ends at such."""
    if kind != "vllm":
        pytest.skip("lorad gives it other files")
    monkeypatch.setattr(holdings, "served", lambda adapter, *_: adapter)
    expected = merged_logprobs(adapter_of(name), tmp_path / "merged")
    assert np.abs(await engine.score(await loaded(engine, name), BATCH) - expected).max() < TOLERANCE
