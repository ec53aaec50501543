"""Log-probabilities, gradients and steps of each backend on SmolLM2, beside transformers and PEFT."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kit import ours
from lorad.adapters.peft import read_peft, write_peft
from lorad.engines.base import BASE, AdapterSource, Engine
from lorad.models.directory import linear_shapes, read_config
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets, Prompt, Sampling
from lorad.trainers.base import Policy, SlotSpec, Trainer
from tests.conformance.engine_suite import complete
from tests.conformance.reference import adapted, reference_logprobs, reference_model
from tests.engines.real import places
from tests.kit.fakes.random_adapters import random_adapter
from tests.llm.place import additions, answered, prompt_tokens
from tests.trainers.real.start import started

RANK, STD = 16, 0.02  # of the adapter: as far from the base as some dozens of steps go
RATE, STEPS = 8e-4, 3
CHATS, SAMPLES = 2, 4  # with three answers each; sampled of each
SIZES: Mapping[str, Mapping[str, Any]] = {"fsdp": {"dp": 2}, "megatron": {"dp": 2}}

Numbers = dict[str, float]  # the largest difference of each kind, in nats unless it says otherwise


def an_adapter(base: Path, directory: Path) -> Path:
    """Write a random adapter on every linear but the head, as a PEFT directory."""
    directory.mkdir()
    shapes = linear_shapes(read_config(base))
    write_peft(random_adapter(shapes, 0, RANK, STD), directory, str(base))
    return directory


async def of_trainer(backend: str, base: Path, work: Path, chats: int = CHATS, steps: int = STEPS) -> Numbers:
    """Compare the base, an adapter, its gradient and some steps of AdamW."""
    adapter, batch = an_adapter(base, work / "adapter"), answered(base, additions("train", chats))
    async with opened_trainer(backend, base, work) as trainer:
        config = read_peft(adapter).config
        await trainer.open("a", SlotSpec(adapter=config, source=adapter))
        model = reference_model(base)
        plain = reference_logprobs(model, batch).detach().numpy()
        peft: Any = adapted(model, adapter)
        before = reference_logprobs(peft, batch).detach().numpy()
        numbers = {
            "base": _apart(await trainer.logprobs(Policy(), batch), plain),
            "adapter": _apart(await trainer.logprobs(Policy("a"), batch), before),
        }
        norms = [await _step(trainer, batch) for _ in range(steps)]
        expected = _adamw(peft, batch, steps)
        numbers["gradient, relative"] = max(abs(a / b - 1) for a, b in zip(norms, expected, strict=True))
        after = reference_logprobs(peft, batch).detach().numpy()
        numbers[f"after {steps} steps"] = _apart(await trainer.logprobs(Policy("a"), batch), after)
        (work / "trained").mkdir()
        write_peft(await trainer.export("a"), work / "trained", str(base))
        peft.load_adapter(work / "trained", "trained")
        peft.set_adapter("trained")
        exported = reference_logprobs(peft, batch).detach().numpy()
        numbers["its export in PEFT"] = _apart(exported, after)
    assert _apart(plain, before) > 0.1 and _apart(before, after) > 0.1, "nothing was adapted or trained"
    return numbers


async def of_engine(kind: str, base: Path, work: Path, chats: int = CHATS, samples: int = SAMPLES) -> Numbers:
    """Compare scores of the base and an adapter, and log-probabilities of what both sample side by side."""
    adapter, of = an_adapter(base, work / "adapter"), additions("train", chats)
    batch = answered(base, of)
    async with opened_engine(kind, base, work) as engine:
        held = read_peft(adapter)
        await engine.load("a@1", AdapterSource(held.digest(), held, directory=adapter))
        how = Sampling(max_new_tokens=16, temperature=1.0, stream=False)
        prompts = [
            Prompt(f"p{i}", prompt_tokens(base, each), np.arange(samples, dtype=np.uint64))
            for i, each in enumerate(of)
        ]
        names = (BASE, "a@1")
        made = await asyncio.gather(*(complete(engine, name, prompts, how, name) for name in names))
        numbers, apart = {}, []
        model = reference_model(base)
        for name, completed in zip(names, made, strict=True):
            if name != BASE:
                model = adapted(model, adapter)
            expected = reference_logprobs(model, batch).detach().numpy()
            numbers["base" if name == BASE else "adapter"] = _apart(await engine.score(name, batch), expected)
            groups = [
                (p.tokens, [np.array(completed[p.id, i][0], np.int32) for i in range(samples)])
                for p in prompts
            ]
            said = np.concatenate([completed[p.id, i][1] for p in prompts for i in range(samples)])
            apart.append(_apart(said, reference_logprobs(model, Batch.of(groups)).detach().numpy()))
        numbers["samples of both, mixed"] = max(apart)
    return numbers


@asynccontextmanager
async def opened_trainer(backend: str, base: Path, work: Path) -> AsyncIterator[Trainer]:
    if backend == "builtin":
        async with ours.opened(base) as held:
            yield held.trainer
        return
    trainer = await started(backend, base, work, **SIZES[backend])
    try:
        yield trainer
    finally:
        await trainer.shut_down()


@asynccontextmanager
async def opened_engine(kind: str, base: Path, work: Path) -> AsyncIterator[Engine]:
    if kind == "builtin":
        async with ours.opened(base) as held:
            yield held.engine
        return
    async with places.opened(kind, work, base, env=of_any_model(places.ENVIRONMENT[kind])) as engine:
        yield engine


def of_any_model(env: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment with which it imports the modules of all models."""
    return {key: value for key, value in env.items() if key != "SGLANG_DISABLED_MODEL_ARCHS"}


def _apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference of log-probabilities, in nats."""
    return float(np.abs(ours - theirs).max())


def _weights(batch: Batch) -> np.ndarray:
    """Return an advantage for each token: two answers of each chat are right, the third is wrong."""
    right = np.tile(np.array([1, 1, -1], np.float32), batch.completion_lengths.size // 3)
    return np.repeat(right, batch.completion_lengths)


async def _step(trainer: Trainer, batch: Batch) -> float:
    """Take one step of the policy gradient; returns the gradient's norm before it is clipped to 1."""
    advantages = _weights(batch)
    sampler = await trainer.logprobs(Policy("a"), batch)
    targets = PolicyTargets(advantages, sampler)
    await trainer.forward_backward("a", batch, targets, PolicyLoss(), float(advantages.size))
    return (await trainer.optim_step("a", RATE, 1.0)).grad_norm


def _adamw(model: torch.nn.Module, batch: Batch, steps: int) -> list[float]:
    """Take the same steps by autograd and torch's AdamW; returns the norms."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, RATE, weight_decay=0.0)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        logprobs = reference_logprobs(model, batch)
        logprobs.backward(-logprobs.new_tensor(_weights(batch)) / logprobs.numel())
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
    return norms


def rows_of(numbers: Mapping[str, Numbers]) -> list[str]:
    """Return a table of backends and kinds, as Markdown."""
    kinds = list(dict.fromkeys(kind for of in numbers.values() for kind in of))
    lines = [f"| | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for backend, of in numbers.items():
        cells = [f"{of[kind]:.1e}" if kind in of else "" for kind in kinds]
        lines.append(f"| {backend} | {' | '.join(cells)} |")
    return lines
