"""Mixtures of experts: parity, and what adapters on experts cost.

    make bench-moe, or python -m benchmarks.training.moe [--rounds 5]

parity: adapters on `builtin:tiny-moe`, by each trainer and engine, against transformers with the adapter
added into the weights: the largest difference of a log-probability, nats. Megatron and servers only where
LORAD_MEGATRON_PYTHON, LORAD_SGLANG_PYTHON and LORAD_VLLM_PYTHON name them.

train: gradients of 1,024 tokens on a random Qwen3-MoE (2 layers, 64 experts of 192 in 512, each token meets
8), rank 8 on attention and every expert, against transformers with PEFT.

bound: of the same gradients the products with frozen weights and the attention alone, which both need, by
torch's own kernel.

step: of GRPO on the same model, 4 prompts of 64 tokens with 8 samples of 64: sampling, and gradients of all
samples, against transformers' generate and a pass over its rows, with the same adapter by PEFT.

decode: a batch of 32 rows and 32 new tokens of each, of the base, of one adapter, and of four that share it.

fp32; OMP_NUM_THREADS threads, one by default. A B A B; medians of CPU time. JSON on stdout.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kit import ours
from benchmarks.kit.ours import prompts_of
from lorad.adapters.peft import write_peft
from lorad.adapters.targets import experts_of, leaf
from lorad.backends.setup import targets
from lorad.engines.base import BASE, AdapterSource, Engine
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets, Sampling
from lorad.trainers.base import Policy, SlotSpec, Trainer
from tests.conformance.expert_adapters import ADAPTERS, BATCH, MOE, SHAPES, adapter_of, merged_logprobs
from tests.engines.real import places
from tests.kit.fakes.random_adapters import random_adapter
from tests.models.test_families import make_model
from tests.trainers.real.start import python_of, started

RANKS: dict[str, dict[str, Any]] = {
    "fsdp 1": {},
    "fsdp 2": {"dp": 2},
    "megatron 1": {},
    "megatron ep 2": {"dp": 2, "ep": 2},
}
RANK, TOKENS, ROWS, NEW = 8, 1024, 32, 32
PROMPTS, GROUP, LENGTH = 4, 8, 64  # of a GRPO step; tokens of a prompt, and of a sample
VOCAB = 1000
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 192,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
}
Scores = Callable[[str, AdapterSource], Awaitable[np.ndarray]]


@asynccontextmanager
async def scored_by(who: str, work: Path) -> AsyncIterator[Scores]:
    """How a trainer or an engine says log-probabilities of `BATCH` under an adapter."""

    def of_trainer(trainer: Trainer) -> Scores:
        async def score(name: str, source: AdapterSource) -> np.ndarray:
            assert source.adapter is not None
            (work / f"{who}-{name}").mkdir()
            write_peft(source.adapter, work / f"{who}-{name}", str(MOE))
            await trainer.open(name, SlotSpec(source.adapter.config, source=work / f"{who}-{name}"))
            return await trainer.logprobs(Policy(name), BATCH)

        return score

    def of_engine(engine: Engine) -> Scores:
        async def score(name: str, source: AdapterSource) -> np.ndarray:
            await engine.load(f"{name}@1", source)
            return await engine.score(f"{name}@1", BATCH)

        return score

    if who.startswith("builtin"):
        async with ours.opened(MOE) as held:
            yield of_trainer(held.trainer) if who == "builtin trainer" else of_engine(held.engine)
    elif who in RANKS:
        (work / who).mkdir()
        trainer = await started(who.split()[0], MOE, work / who, **RANKS[who])
        try:
            yield of_trainer(trainer)
        finally:
            await trainer.shut_down()
    else:
        (work / who).mkdir()
        of_experts = {leaf(name) for name in SHAPES if experts_of(name)}
        wanted = targets(SHAPES, {leaf(name) for name in SHAPES} - of_experts, of_experts)
        async with places.opened(who, work / who, MOE, targets=wanted) as engine:
            yield of_engine(engine)


async def parity(work: Path) -> dict[str, dict[str, float]]:
    wanted = {name: merged_logprobs(adapter_of(name), work / f"merged-{name}") for name in ADAPTERS}
    found: dict[str, dict[str, float]] = {}
    for who in ("builtin trainer", "builtin engine", *RANKS, *places.KINDS):
        if who in places.KINDS and not places.python_of(who):
            continue
        if who in RANKS and python_of(who.split()[0]) is None:
            continue
        print(f"parity: {who}", file=sys.stderr)
        async with scored_by(who, work) as score:
            found[who] = {}
            for name, expected in wanted.items():
                adapter = adapter_of(name)
                scores = await score(name, AdapterSource(adapter.digest(), adapter=adapter))
                found[who][name] = float(np.abs(scores - expected).max())
    return found


async def costs(work: Path, rounds: int) -> dict[str, dict[str, float]]:
    make_model(work / "large", "qwen3_moe", **SIZES)
    ids = np.random.default_rng(0).integers(0, VOCAB, TOKENS + 1).astype(np.int32)
    peer = _Peer(work / "large", ids)
    async with ours.opened(work / "large", mix_calls=True) as held:
        modules = tuple(sorted(held.trainer.modules()))
        adapter = random_adapter(held.trainer.modules(), 0, RANK, ours.ADAPTER_STD)
        assert adapter.config.modules == modules
        write_peft(adapter, _made(work / "slot"), "large")
        await held.trainer.open("slot", SlotSpec(adapter.config, source=work / "slot"))
        names = [await held.load(f"a{number}@1", number, RANK) for number in range(4)]

        async def gradients(batch: Batch) -> None:
            count = int(batch.target_lengths.sum())
            advantages = PolicyTargets(np.ones(count, np.float32))
            await held.trainer.forward_backward("slot", batch, advantages, PolicyLoss(), float(count))
            await held.trainer.discard_grads("slot")

        async def step() -> None:
            prompts = np.random.default_rng(1).integers(0, VOCAB, (PROMPTS, LENGTH)).astype(np.int32)
            made = await held.complete(names[0], prompts_of(prompts, GROUP, 1), Sampling(LENGTH), "step")
            pairs = zip(prompts, made, strict=True)
            await gradients(Batch.of([(prompt, [tokens for tokens, _ in some]) for prompt, some in pairs]))

        async def decode(versions: list[str], call: int = 0) -> None:
            rows = np.random.default_rng(call).integers(0, VOCAB, (ROWS // len(versions), 8))
            await asyncio.gather(
                *(
                    held.complete(version, prompts_of(rows, 1, number), Sampling(NEW), f"{version} {number}")
                    for number, version in enumerate(versions)
                )
            )

        alone = Batch.of([(ids[:1], [ids[1:]])])
        train_ms = await _alternating(
            rounds,
            {"lorad": lambda: gradients(alone), "bound": _bound, "transformers + PEFT": peer.gradients},
        )
        step_ms = await _alternating(rounds, {"lorad": step, "transformers + PEFT": peer.step})
        decode_ms = await _alternating(
            rounds,
            {
                "base": lambda: decode([BASE]),
                "one adapter": lambda: decode(names[:1]),
                "four adapters": lambda: decode(names),
            },
        )
    return {"train, ms": train_ms, "step, ms": step_ms, "decode, ms": decode_ms}


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


class _Peer:
    """What transformers and PEFT do for the same."""

    def __init__(self, directory: Path, ids: np.ndarray) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        warnings.simplefilter("ignore")  # the peer's
        leaves = ["q_proj", "k_proj", "v_proj", "o_proj"]
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=leaves, target_parameters=experts)
        self._model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), config
        )
        head = self._model.get_base_model().lm_head  # without the hook a weight is copied for each row
        head.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
        self._tokens = torch.from_numpy(ids.astype(np.int64))[None]

    async def gradients(self) -> None:
        self._gradients(self._tokens, 1)

    async def step(self) -> None:
        prompts = np.random.default_rng(1).integers(0, VOCAB, (PROMPTS, LENGTH))
        rows = torch.from_numpy(prompts.repeat(GROUP, 0))
        with torch.no_grad():
            made = self._model.generate(
                input_ids=rows,
                attention_mask=torch.ones_like(rows),
                do_sample=True,
                top_k=0,
                max_new_tokens=LENGTH,
                min_new_tokens=LENGTH,
            )
        self._gradients(made, LENGTH)

    def _gradients(self, tokens: torch.Tensor, prompt: int) -> None:
        """tokens: [rows, prompt + completion]."""
        kept = tokens.shape[1] - prompt
        model, wanted = self._model, tokens[:, prompt:].flatten()
        states = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=kept)
        torch.nn.functional.cross_entropy(states.logits.flatten(0, 1), wanted).backward()
        model.zero_grad()


async def _bound() -> None:
    """Frozen products, forward and for the gradient of what went in, and attention of `TOKENS` tokens, with
    as many rows for each expert.
    """
    hidden, width, count = SIZES["hidden_size"], SIZES["moe_intermediate_size"], SIZES["num_experts"]
    heads, kv, dim = SIZES["num_attention_heads"], SIZES["num_key_value_heads"], SIZES["head_dim"]
    rows = TOKENS * SIZES["num_experts_per_tok"] // count
    linears = [
        (1, TOKENS, hidden, (heads + 2 * kv) * dim),
        (1, TOKENS, heads * dim, hidden),
        (1, TOKENS, hidden, count),
        (count, rows, hidden, 2 * width),
        (count, rows, width, hidden),
    ]
    for products in (linears, linears, [(1, TOKENS, hidden, VOCAB)]):
        for many, some, into, out in products:
            x, weights = torch.zeros(many, some, into), torch.zeros(many, out, into)
            y = torch.empty(many, some, out)
            for one, weight, product in zip(x, weights, y, strict=True):
                torch.mm(one, weight.T, out=product)
            for one, weight, product in zip(x, weights, y, strict=True):
                torch.mm(product, weight, out=one)
    for _ in range(2):
        q, k, v = (torch.zeros(1, heads, TOKENS, dim, requires_grad=True) for _ in range(3))
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


async def _alternating(rounds: int, what: dict[str, Callable[[], Awaitable[None]]]) -> dict[str, float]:
    """Median milliseconds of CPU time of each, one after another in each round but the first."""
    seconds: dict[str, list[float]] = {name: [] for name in what}
    for turn in range(rounds + 1):
        for name, do in what.items():
            began = time.process_time()
            await do()
            if turn:
                seconds[name].append(time.process_time() - began)
    return {name: 1000 * statistics.median(found) for name, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["parity", "costs"])
    arguments = parser.parse_args()
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(threads))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="lr-moe-") as name:
        if arguments.only != "costs":
            found["parity, nats"] = asyncio.run(parity(Path(name)))
        if arguments.only != "parity":
            found |= asyncio.run(costs(Path(name), arguments.rounds))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
