"""Canaries: short texts of the base itself, on which engine and trainer are compared whenever a version is
loaded.

Near-certain tokens carry neither noise nor signal, so more are sampled than needed and the least certain ones
stay.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from lorad.engines.base import BASE, Engine, Scored
from lorad.errors import AttestationFailed
from lorad.protocol.batch import Batch, Chunk, Prompt, Sampling
from lorad.protocol.heartbeat import HEART, Count
from lorad.routes import Routes

PROMPT_TOKENS = 8
_CANDIDATES = 4  # sampled for each canary that is wanted
_UNCERTAIN = (0.01, 0.9)  # probabilities of tokens that are informative
_FEWEST = 4
_FEWEST_TELLING = 80  # canaries; and tokens among theirs that are not nearly certain
_OUTLIERS = 2.2
_MOST_NOISE = {"float32": 1e-4, "bfloat16": 0.15}  # nats rms; above, engine and trainer hold different bases


class Canaries(Struct, frozen=True):
    """The texts and what both sides say of them under the base.

    Attributes:
        engine: The engine's log-probabilities, float64 [T]; with several servers, which are to hold the same,
            the first one's.
        trainer: The trainer's log-probabilities, float64 [T].
        sigma: The rms difference of both, in nats.
        unmet: The experts of the base that none of the texts is sent to; None where the trainer does not
            know.
        reroutes: Whether engine and trainer send some tokens to different experts.
        routes: Where the first server sends the tokens, if that is known and rounding may decide it.
        few: The first of them, where these suffice for a direct comparison and a test by name; else None.
    """

    batch: Batch
    engine: np.ndarray
    trainer: np.ndarray
    sigma: float
    unmet: frozenset[str] | None = frozenset()
    reroutes: bool = False
    routes: Routes | None = None
    few: "Canaries | None" = None

    @property
    def tokens(self) -> int:
        return int(self.batch.completions.size)


async def measure_canaries(
    engine: Engine,
    trainer: np.ndarray,
    batch: Batch,
    unmet: frozenset[str] | None,
    *,
    may_reroute: bool = False,
) -> Canaries:
    """Ask the engine, and compare it with the trainer; sigma is the largest of any server.

    Raises AttestationFailed when engine and trainer disagree about the base by more than arithmetic explains.

    Args:
        trainer: The trainer's log-probabilities under the base.
        unmet: See `Canaries`.
        may_reroute: Whether the base is a mixture, and rounding may decide where a token goes.
    """
    answers = await score_on_servers(engine, BASE, batch, with_routes=may_reroute)
    by_server = [answer.logprobs.astype(np.float64) for answer in answers]
    trainer_base = trainer.astype(np.float64)
    sigmas = [float(np.sqrt(np.mean((scores - trainer_base) ** 2))) for scores in by_server]
    sigma = float(np.max(sigmas))  # NaN among them is NaN
    limit = _MOST_NOISE[engine.capabilities().dtype]
    if not sigma <= limit:
        raise AttestationFailed(
            f"engine and trainer disagree about the base itself: rms {sigma:.2g} nats, at most {limit:g} is "
            "rounding",
            hint="Do both use the same checkpoint? Restart the pool; `lorad doctor` checks the backends.",
        )
    reroutes = may_reroute and any(has_outliers(scores - trainer_base) for scores in by_server)
    return Canaries(batch, by_server[0], trainer_base, sigma, unmet, reroutes, answers[0].routes)


async def score_on_servers(engine: Engine, name: str, batch: Batch, *, with_routes: bool) -> Sequence[Scored]:
    """Return what each server says of a batch, and `with_routes` also where it sends tokens, if it knows."""
    if with_routes and engine.capabilities().routes is not None:
        return await engine.routed_scores(name, batch)
    return [Scored(logprobs) for logprobs in await engine.scores(name, batch)]


def has_outliers(difference: np.ndarray) -> bool:
    """Return whether a few tokens have most of the noise. Rounding alone has an rms of 1.5 medians; 3.4 were
    measured where some tokens of a mixture went to other experts (8 layers of 64 experts in bfloat16).
    """
    rms = float(np.sqrt(np.mean(difference**2)))
    return rms > _OUTLIERS * float(np.median(np.abs(difference)))


async def sample_canaries(
    engine: Engine, vocab_size: int, count: int, tokens: int, placeholders: frozenset[int] = frozenset()
) -> Batch:
    """Return `count` canaries of `tokens` tokens, the same ones for the same base.

    Prompts are drawn from the vocabulary with a fixed seed, completions from the base at temperature 1. A
    placeholder without an image has the embedding of padding in transformers, its own one in vLLM: no prompt
    has one, and a completion with one comes last.
    """
    random = np.random.default_rng([vocab_size, count, tokens])
    words = np.arange(vocab_size, dtype=np.int32)
    words = words[~np.isin(words, [*placeholders])]
    prompts = [
        Prompt(
            id=str(index),
            tokens=words[random.integers(0, words.size, PROMPT_TOKENS)],
            seeds=random.integers(0, 1 << 62, 1).astype(np.uint64),
        )
        for index in range(_CANDIDATES * count)
    ]
    room = engine.capabilities().max_tokens - PROMPT_TOKENS
    parts: dict[str, list[Chunk]] = {prompt.id: [] for prompt in prompts}
    how = Sampling(max_new_tokens=min(tokens, room))
    # tokens are counted, as the samples end together
    counted = Count("comparing engine and trainer", len(prompts) * how.max_new_tokens, HEART.tell)
    async for chunk in engine.generate(f"canaries {count} x {tokens}", BASE, prompts, how):
        parts[chunk.prompt].append(chunk)
        counted.add(ended=chunk.tokens.size)

    def uncertain(prompt: Prompt) -> int:
        if any(placeholders.intersection(chunk.tokens.tolist()) for chunk in parts[prompt.id]):
            return -1
        probabilities = np.exp(np.concatenate([chunk.logprobs for chunk in parts[prompt.id]]))
        return int(((probabilities > _UNCERTAIN[0]) & (probabilities < _UNCERTAIN[1])).sum())

    best = sorted(prompts, key=uncertain, reverse=True)[:count]
    return Batch.of([(p.tokens, [np.concatenate([c.tokens for c in parts[p.id]])]) for p in best])


def count_needed(logprobs: np.ndarray, batch: Batch) -> int:
    """Count the first canaries that together hold enough uncertain tokens, by log-probabilities, [T]."""
    telling = np.exp(logprobs) < _UNCERTAIN[1]
    ends = np.cumsum(batch.completion_lengths)
    counts = np.cumsum(telling)[ends - 1]
    return min(max(_FEWEST, int(np.searchsorted(counts, _FEWEST_TELLING)) + 1), ends.size)


def first_canaries(batch: Batch, count: int) -> Batch:
    """Return the first `count` canaries; the batch itself when these are all."""
    if count == batch.completion_lengths.size:
        return batch
    prompts = np.split(batch.prompts, np.cumsum(batch.prompt_lengths))[:count]
    completions = np.split(batch.completions, np.cumsum(batch.completion_lengths))[:count]
    return Batch.of([(prompt, [completion]) for prompt, completion in zip(prompts, completions, strict=True)])
