"""Verb one: sample completions of the next prompts, with the current version or, ahead of training, with one
before.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
from msgspec import structs

from lorad.driver.door.play import play_programs
from lorad.driver.rewards import Rewarder, Score, Scoring
from lorad.driver.sampling.episodes import play
from lorad.driver.sampling.free import play_freely
from lorad.driver.sampling.generate import count_of, generate, joined, seeds_of
from lorad.driver.sampling.routes import routes_of, said, with_prompts
from lorad.driver.score import worth
from lorad.driver.session import Plan, Rollout, Sample, Session
from lorad.envs.host import Hosts
from lorad.envs.programs import ProgramHosts
from lorad.errors import LoradError
from lorad.protocol.batch import Chunk, Prompt, Sampling
from lorad.protocol.calls import Generated
from lorad.protocol.connection import Connection
from lorad.rl.data import Example
from lorad.spec.model import Rollout as RolloutSpec


def sample(session: Session) -> Rollout:
    """`prompts_per_step` prompts times `group_size` samples: made now, or waited for where sampling runs
    ahead.

    Raises LoradError when any token is another version's, or the version is older than
    `rollout.max_staleness` allows.
    """
    state = session.state
    if session.ahead is not None:
        with session.timed("sample"):
            rollout = session.ahead.take(state.step)
    else:
        now = plan(session, state.step, state.position, state.version, state.step)
        with session.timed("sample"):
            rollout = make(session, session.pool, now)
    refuse_stale(session, rollout)
    state.position = rollout.plan.position + rollout.consumed
    return rollout


def plan(session: Session, step: int, position: int, version: int, trained: int) -> Plan:
    """Samples by a version for the step after `step`; `trained`: the steps behind that version."""
    examples = session.train_data.take(position, session.spec.data.prompts_per_step)
    return Plan(step, examples, position, version, trained)


def make(session: Session, pool: Connection, wanted: Plan) -> Rollout:
    """Make the samples as planned. Reads only what does not change in the session, so that any thread may.

    With algorithm.dynamic_sampling more prompts are sampled until enough groups are worth training on. They
    are taken in the order of the data, whatever order they end in.
    """
    started = time.perf_counter()
    refill, size = session.spec.algorithm.refill, session.spec.algorithm.group_size
    groups, made, scoring = complete(session, pool, wanted, size, sampling(session))
    count, waited, tokens = len(wanted.examples), made.waited, made.tokens
    places = list(range(count))
    if refill is None:
        seconds = time.perf_counter() - started
        return Rollout(wanted, groups, places, count, count, tokens, seconds, waited, scoring)
    scores = _by_group(scoring.scores(), size)
    batches, looked = 1, count
    while True:
        good = [place for place in range(looked) if _is_worth(session, groups[place], scores[place])]
        missing = count - len(good)
        if missing <= 0 or batches == refill.max_batches or _fails(session, scores):
            break
        asked = min(count, math.ceil(missing * looked / max(len(good), 1)))
        if session.train_data.size is not None and looked + asked > session.train_data.size:
            break
        examples = session.train_data.take(wanted.position + looked, asked)
        asked_for = replace(wanted, examples=examples)
        more, made, scoring = complete(session, pool, asked_for, size, sampling(session))
        groups, waited, tokens = groups + more, waited + made.waited, tokens + made.tokens
        scores += _by_group(scoring.scores(), size)
        batches, looked = batches + 1, looked + asked
    chosen = good[:count] if len(good) >= count else _filled(good, looked, count)
    consumed = chosen[-1] + 1 if missing <= 0 else looked
    return Rollout(
        wanted,
        [groups[place] for place in chosen],
        chosen,
        consumed,
        looked,
        tokens,
        time.perf_counter() - started,
        waited,
        Scoring.of([score for place in chosen for score in scores[place]]),
    )


def _filled(good: list[int], looked: int, count: int) -> list[int]:
    """Fill up the groups worth training on with the first of the others, which count in the normaliser."""
    others = [place for place in range(looked) if place not in set(good)]
    return sorted([*good, *others[: count - len(good)]])


def _is_worth(session: Session, group: list[Sample], scores: list[Score]) -> bool:
    """Return whether a group teaches something: rewards that differ, or a mean within the bounds."""
    refill = session.spec.algorithm.refill
    earned, scored = worth(session.spec, group, scores)
    if earned.size < 2 or refill is None:
        return False
    if refill.keep is not None:
        mean = np.mean([s.value for s, has_reward in zip(scores, scored, strict=True) if has_reward])
        return bool(refill.keep[0] <= mean <= refill.keep[1])
    return bool(np.ptp(earned) > 0)


def _by_group(scores: list[Score], size: int) -> list[list[Score]]:
    return [scores[start : start + size] for start in range(0, len(scores), size)]


def _fails(session: Session, scores: list[list[Score]]) -> bool:
    """Return whether so many rewards failed that the step ends the run."""
    failed = [score.value is None for group in scores for score in group]
    return sum(failed) > session.spec.max_failures * len(failed)


def refuse_stale(session: Session, rollout: Rollout) -> None:
    """Raise LoradError for samples of a version older than `rollout.max_staleness` allows."""
    staleness, limit = rollout.plan.staleness, session.spec.rollout.max_staleness
    if staleness > limit:
        raise LoradError(
            f"the samples for step {rollout.plan.step + 1} are of {session.name_of(rollout.plan.version)}, "
            f"{staleness} versions old, and rollout.max_staleness is {limit}; nothing was trained on them",
            hint=f"`lorad resume {session.params.run}` samples them again.",
        )


def sampling(session: Session) -> Sampling:
    """A reward of user code gets samples as they end; without one all come together, which is cheaper."""
    how = sampling_of(session.spec.rollout, session.tokenizer.eos_ids)
    return structs.replace(how, as_they_end=session.rewarder.runs_user_code, routes=session.records_routes)


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


def complete(
    session: Session,
    pool: Connection,
    wanted: Plan,
    n: int,
    how: Sampling,
    rewarder: Rewarder | None = None,
    *,
    seed: int | None = None,
) -> tuple[list[list[Sample]], Generated, Scoring]:
    """Sample `n` completions of each example with the plan's version; returns them in order, the pool's
    summary, and their scores, which are being made.

    rewarder, seed: of an evaluation; None for those of the run.
    """
    version, rewarder = session.name_of(wanted.version), rewarder or session.rewarder
    is_eval, seed = seed is not None, session.spec.seed if seed is None else seed
    if session.hosts is not None:
        groups, made = _play(session, session.hosts, pool, wanted, n, how, seed=seed, is_eval=is_eval)
        return groups, made, Scoring.of([s.episode.score for group in groups for s in group if s.episode])
    seeds, prompts = seeds_of(seed, wanted, n), []
    for place, (example, some) in enumerate(zip(wanted.examples, seeds, strict=True)):
        tokens = np.array(example.tokens, np.int32)
        prompts.append(Prompt(str(place), tokens, np.array([seed(0) for seed in some], np.uint64)))
    scoring = rewarder.scoring([n] * len(prompts))
    samples: dict[int, Sample] = {}
    count = count_of(wanted, n, is_eval=is_eval)

    def ended(prompt: int, index: int, chunks: list[Chunk]) -> None:
        sample = _sample(session, wanted.examples[prompt], index, chunks)
        samples[prompt * n + index] = sample
        count.add(ended=1)
        scored = sample.for_reward(session.tokenizer, raw=rewarder.wants_raw)
        scoring.add(prompt * n + index, scored)

    made = generate(pool, version, prompts, how, ended, count)
    places = range(0, n * len(prompts), n)
    return [with_prompts([samples[place + i] for i in range(n)]) for place in places], made, scoring


def _play(
    session: Session,
    hosts: Hosts | ProgramHosts,
    pool: Connection,
    wanted: Plan,
    n: int,
    how: Sampling,
    *,
    seed: int,
    is_eval: bool,
) -> tuple[list[list[Sample]], Generated]:
    if isinstance(hosts, ProgramHosts):
        return play_programs(session, hosts, pool, wanted, n, how, seed=seed, is_eval=is_eval)
    if session.plays_freely:
        return play_freely(session, hosts, pool, wanted, n, how, seed=seed, is_eval=is_eval)
    return play(session, hosts, partial(generate, pool), wanted, n, how, seed=seed, is_eval=is_eval)


def _sample(session: Session, example: Example, index: int, chunks: list[Chunk]) -> Sample:
    last = chunks[-1]
    if last.finish not in ("stop", "length"):
        raise LoradError(
            f"sample {index} of prompt {example.id} ended with {last.finish!r}; the engine's log says more"
        )
    tokens, logprobs = joined([c.tokens for c in chunks]), joined([c.logprobs for c in chunks])
    text = session.tokenizer.completion(tokens.tolist(), session.spec.rollout.stop)
    read, size = len(example.tokens), tokens.size
    routes, of_prompt = routes_of([said(None, chunks, read, size)], [(read, size)])
    return Sample(
        example,
        index,
        last.version,
        tokens,
        logprobs,
        last.finish,
        text,
        routes=routes,
        prompt_routes=of_prompt,
    )
