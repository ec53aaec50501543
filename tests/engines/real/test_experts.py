"""Adapters on the experts of a mixture, in the servers' own loaders: each is what its merged model has."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from lorad.adapters.adapter import Adapter
from lorad.adapters.targets import experts_of, leaf, match_modules
from lorad.backends.setup import targets
from lorad.engines.base import BASE, AdapterSource, Engine
from lorad.models.directory import linear_shapes, read_config, resolve
from tests.conformance.reference import random_batch, reference_logprobs, reference_model
from tests.engines.real.own_names import OwnNames
from tests.engines.real.places import opened
from tests.kit.fakes.random_adapters import partial, random_adapter

MOE = resolve("builtin:tiny-moe")
SHAPES = linear_shapes(read_config(MOE))
OF_EXPERTS = {leaf(name) for name in SHAPES if experts_of(name)}
TOLERANCE = 1e-4  # nats, fp32
BATCH = random_batch(1)
ADAPTERS = {
    "experts": ("*.experts.*", False),
    "all": ("all-linear", False),
    "gate-up": ("*.experts.*.gate_proj,*.experts.*.up_proj", False),
    "up": ("*.experts.*.up_proj", False),
    "one-expert": ("*.experts.1.*", False),
    "one-layer": ("*.layers.0.mlp.experts.*", False),
    "rslora": ("all-linear", True),
    "attention": ("q_proj,k_proj", False),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mixtures(kind: str, work: Path) -> AsyncIterator[Engine]:
    """One server of the mixture, started as for a run that adapts experts."""
    (work / "moe").mkdir()
    wanted = targets(SHAPES, {leaf(name) for name in SHAPES} - OF_EXPERTS, OF_EXPERTS)
    async with opened(kind, work / "moe", MOE, targets=wanted) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def engine(mixtures: Engine) -> AsyncIterator[Engine]:
    own = OwnNames(mixtures)
    yield own
    await own.close()


@pytest.fixture(scope="module")
def base() -> np.ndarray:
    found: np.ndarray = reference_logprobs(reference_model(MOE), BATCH).detach().numpy()
    return found


def adapter_of(name: str) -> Adapter:
    entry, rslora = ADAPTERS[name]
    return partial(random_adapter(SHAPES, len(name), 8), match_modules(SHAPES, entry), rslora=rslora)


def merged_logprobs(adapter: Adapter, directory: Path) -> np.ndarray:
    """What transformers says of the base with the adapter added into its weights."""
    shutil.copytree(MOE, directory)
    weights = load_file(directory / "model.safetensors")
    for module in adapter.config.modules:
        a, b = (torch.tensor(adapter.tensors[f"{module}.lora_{half}.weight"]) for half in "AB")
        weights[f"{module}.weight"] += adapter.config.scale * b @ a
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    found: np.ndarray = reference_logprobs(reference_model(directory), BATCH).detach().numpy()
    return found


async def loaded(engine: Engine, name: str) -> str:
    adapter = adapter_of(name)
    await engine.load(f"{name}@1", AdapterSource(adapter.digest(), adapter=adapter))
    return f"{name}@1"


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
