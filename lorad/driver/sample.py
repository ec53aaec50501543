"""Verb one: sample completions of the next prompts with the current version."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from lorad.driver.session import Rollout, Sample, Session
from lorad.errors import LoradError
from lorad.protocol.batch import Chunk, Prompt, Sampling
from lorad.protocol.calls import Generate
from lorad.rl.data import Example
from lorad.specs import Rollout as RolloutSpec


def sample(session: Session) -> Rollout:
    """`prompts_per_step` prompts times `group_size` samples. Raises LoradError when any token is another version's."""
    spec, state = session.spec, session.state
    position = state.position
    examples = session.train_data.take(position, spec.data.prompts_per_step)
    with session.timed("sample"):
        groups = complete(session, examples, spec.algorithm.group_size, sampling(session))
    state.position += len(examples)
    return Rollout(examples, groups, position, state.version)


def sampling(session: Session, *, greedy: bool = False) -> Sampling:
    return sampling_of(session.spec.rollout, session.tokenizer.eos_ids, greedy=greedy)


def sampling_of(rollout: RolloutSpec, stop_token_ids: Iterable[int], *, greedy: bool = False) -> Sampling:
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=0.0 if greedy else rollout.temperature,
        top_p=1.0 if greedy else rollout.top_p,
        top_k=0 if greedy else rollout.top_k,
        stop_token_ids=tuple(stop_token_ids),
        stop=tuple(rollout.stop),
        stream=False,
    )


def complete(session: Session, examples: Sequence[Example], n: int, how: Sampling) -> list[list[Sample]]:
    """`n` samples of each example by the current version, in order."""
    prompts = _prompts(session, examples, n)
    parts: dict[tuple[str, int], list[Chunk]] = {}
    *items, _ = session.pool.stream("generate", Generate(session.current, prompts, how))
    for item in items:
        if item.version != session.current:
            raise LoradError(f"tokens of {item.version} came for {session.current}; nothing was trained on them")
        for chunk in item.split(prompts):
            parts.setdefault((chunk.prompt, chunk.index), []).append(chunk)
    return [[_sample(session, e, i, parts[p.id, i]) for i in range(n)] for e, p in zip(examples, prompts, strict=True)]


def seed_of(run_seed: int, step: int, prompt: str, index: int) -> int:
    """The seed of one sample: of nothing that a resume changes."""
    text = f"{run_seed}|{step}|{prompt}|{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _prompts(session: Session, examples: Sequence[Example], n: int) -> list[Prompt]:
    seen: Counter[str] = Counter()
    prompts = []
    for place, example in enumerate(examples):
        first = seen[example.id] * n  # a prompt that comes twice in a step gets other samples
        seen[example.id] += 1
        seeds = [seed_of(session.spec.seed, session.state.step, example.id, first + i) for i in range(n)]
        prompts.append(Prompt(str(place), np.array(example.tokens, np.int32), np.array(seeds, np.uint64)))
    return prompts


def _sample(session: Session, example: Example, index: int, chunks: list[Chunk]) -> Sample:
    last = chunks[-1]
    if last.finish not in ("stop", "length"):
        raise LoradError(
            f"sample {index} of prompt {example.id} ended with {last.finish!r}; the engine's log tells more"
        )
    tokens, logprobs = _joined([c.tokens for c in chunks]), _joined([c.logprobs for c in chunks])
    text = session.tokenizer.decode(tokens.tolist())
    return Sample(example, index, last.version, tokens, logprobs, last.finish, text)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
