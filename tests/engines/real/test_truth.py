"""What the real servers compute is what transformers and PEFT compute, for each version, alone and mixed."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

from lorad.adapters.peft import write_peft
from lorad.adapters.targets import match_modules
from lorad.engines.base import BASE, AdapterSource, Engine
from lorad.protocol.batch import Batch, Prompt, Sampling
from tests.conformance.engine_suite import complete
from tests.conformance.reference import random_batch, reference_logprobs, reference_model
from tests.engines.real.places import TINY
from tests.kit.fakes.random_adapters import Shapes, partial, random_adapter

TOLERANCE = 1e-4  # nats, fp32
VERSIONS = {"run@1": 4, "run@2": 8, "run@3": 16}  # rank of each
PARTIAL = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("q_proj,k_proj", "q_proj,v_proj", "k_proj,v_proj,up_proj", "*.layers.1.*.k_proj,*.layers.0.*.up_proj"),
)
"""What `lora.target_modules` may say; servers compute q, k, v together, and gate, up."""


@pytest_asyncio.fixture(loop_scope="session")
async def references(engine: Engine, shapes: Shapes, tmp_path: Path) -> dict[str, torch.nn.Module]:
    """The versions are loaded; what transformers and PEFT make of the same directories."""
    models = {BASE: reference_model(TINY)}
    for seed, (name, rank) in enumerate(VERSIONS.items()):
        adapter = random_adapter(shapes, seed, rank)
        directory = tmp_path / name
        directory.mkdir()
        write_peft(adapter, directory, str(TINY))
        await engine.load(name, AdapterSource(adapter.digest(), directory=directory))
        models[name] = reference_model(TINY, directory)
    return models


async def test_scores_agree_with_transformers_and_peft(
    engine: Engine, references: dict[str, torch.nn.Module]
) -> None:
    batch = random_batch(1)
    for name, model in references.items():
        expected = reference_logprobs(model, batch).detach().numpy()
        assert np.abs(await engine.score(name, batch) - expected).max() < TOLERANCE, name


@pytest.mark.parametrize("rslora", [False, True])
async def test_adapters_of_any_targets_agree_with_peft(
    engine: Engine, shapes: Shapes, tmp_path: Path, rslora: bool
) -> None:
    batch = random_batch(1)
    for seed, targets in enumerate(PARTIAL):
        adapter = partial(
            random_adapter(shapes, seed, 8, std=0.3), match_modules(shapes, targets), rslora=rslora
        )
        directory = tmp_path / f"{seed}"
        directory.mkdir()
        write_peft(adapter, directory, str(TINY))
        await engine.load(f"run@{seed}", AdapterSource(adapter.digest(), directory=directory))
        expected = reference_logprobs(reference_model(TINY, directory), batch).detach().numpy()
        assert np.abs(await engine.score(f"run@{seed}", batch) - expected).max() < TOLERANCE, targets
        await engine.unload(f"run@{seed}")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_mixed_samples_have_logprobs_of_their_version(
    engine: Engine, references: dict[str, torch.nn.Module], temperature: float
) -> None:
    prompts = [
        Prompt(f"p{i}", np.array([5, 9, 7 + i], np.int32), np.arange(4, dtype=np.uint64)) for i in range(3)
    ]
    how = Sampling(max_new_tokens=12, temperature=temperature, stream=False)
    made = await asyncio.gather(*(complete(engine, name, prompts, how, name) for name in references))
    for (name, model), samples in zip(references.items(), made, strict=True):
        groups = [(p.tokens, [np.array(samples[p.id, i][0], np.int32) for i in range(4)]) for p in prompts]
        expected = reference_logprobs(model, Batch.of(groups), temperature).detach().numpy()
        logprobs = np.concatenate([samples[p.id, i][1] for p in prompts for i in range(4)])
        assert np.abs(logprobs - expected).max() < TOLERANCE, name


async def test_samples_follow_the_distribution_that_is_asked_for(engine: Engine) -> None:
    how = Sampling(max_new_tokens=1, stream=False)
    prompts = [Prompt("p", np.array([5, 9], np.int32), np.arange(600, dtype=np.uint64))]
    made = await complete(engine, BASE, prompts, how)
    tokens = np.array([tokens[0] for tokens, _, _ in made.values()])
    chances = {tokens[0]: float(np.exp(logprobs[0])) for tokens, logprobs, _ in made.values()}
    for token, chance in chances.items():
        expected, spread = 600 * chance, np.sqrt(600 * chance * (1 - chance))
        assert abs((tokens == token).sum() - expected) < 6 * spread + 1


async def test_stop_string_ends_a_sample_when_complete(engine: Engine) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))

    def text(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    prompts = [Prompt("p", np.array([5, 9, 7, 11], np.int32), np.array([1], np.uint64))]
    free, _, _ = (await complete(engine, BASE, prompts, Sampling(max_new_tokens=24)))["p", 0]
    stop = next(text([token]) for token in free[3:] if text([token]).isalnum())
    tokens, _, finish = (await complete(engine, BASE, prompts, Sampling(max_new_tokens=24, stop=(stop,))))[
        "p", 0
    ]
    assert finish == "stop" and tokens == free[: len(tokens)]
    assert stop in text(tokens) and stop not in text(tokens[:-1])
