"""Rollout routing replay where it is for: in bfloat16 routers near a tie send tokens elsewhere."""

from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from lorad.engines.base import BASE
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.protocol.batch import Batch, Prompt, Sampling
from lorad.routes import Routes
from lorad.trainers.base import Policy
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.conformance.engine_suite import whole
from tests.models.test_families import make_model

READ, MADE, PROMPTS, EACH = 8, 40, 6, 2


async def sampled(engine: BuiltinEngine) -> tuple[Batch, np.ndarray]:
    """What the engine makes of the base, with its routes, and its log-probabilities."""
    random = np.random.default_rng(0)
    prompts = [
        Prompt(
            str(n), random.integers(0, 64, READ).astype(np.int32), np.arange(EACH, dtype=np.uint64) + 10 * n
        )
        for n in range(PROMPTS)
    ]
    how = Sampling(MADE, stream=False, routes=True)
    found = whole([chunk async for chunk in engine.generate("r", BASE, prompts, how)])
    chunks = [[found[prompt.id, index] for index in range(EACH)] for prompt in prompts]
    sampled_chunks = [chunk for group in chunks for chunk in group]
    routes = [chunk.routes for chunk in sampled_chunks if chunk.routes is not None]
    batch = Batch.of(
        [(p.tokens, [chunk.tokens for chunk in group]) for p, group in zip(prompts, chunks, strict=True)]
    )
    known = Routes(
        np.concatenate([part[:READ] for part in routes[::EACH]]),
        np.concatenate(
            [part[-len(chunk.tokens) :] for chunk, part in zip(sampled_chunks, routes, strict=True)]
        ),
    )
    logprobs = np.concatenate([chunk.logprobs for group in chunks for chunk in group])
    return replace(batch, routes=known), logprobs


async def test_replay_takes_most_of_the_difference_away(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 64}
    make_model(tmp_path, "qwen3_moe", moe_intermediate_size=32, dtype=torch.bfloat16, **sizes)
    compute, cpu = Compute(), torch.device("cpu")
    try:
        engine = BuiltinEngine(load_base(tmp_path, torch.bfloat16, cpu), compute, tmp_path)
        batch, sampler = await sampled(engine)
        trainer = BuiltinTrainer(load_base(tmp_path, torch.float32, cpu), compute)
        found = {
            routes is not None: np.abs(
                await trainer.logprobs(Policy(), replace(batch, routes=routes)) - sampler
            )
            for routes in (batch.routes, None)
        }
    finally:
        compute.close()
    ratio = found[True].mean() / found[False].mean()
    assert ratio < 0.5, f"with replay {found[True].mean():.4f} nats, {ratio:.2f} of those without"
    assert found[True].max() < found[False].max() / 2
