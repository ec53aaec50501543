"""Verb one: sample completions of the next prompts, with the current version or ahead of training."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import add

import numpy as np
from msgspec import structs

from lorad.driver.door.play import play_programs
from lorad.driver.rewards import Rewarder, Score, Scoring
from lorad.driver.sampling.admission import draw, rate
from lorad.driver.sampling.episodes import play
from lorad.driver.sampling.free import play_freely
from lorad.driver.sampling.generate import SampleJob, generate, joined
from lorad.driver.sampling.routes import routes_of, with_prompts, with_routes
from lorad.driver.score import worth
from lorad.driver.session import Plan, Rollout, Sample, Session
from lorad.envs.programs import ProgramHosts
from lorad.errors import LoradError
from lorad.protocol.batch import Chunk, Prompt, Sampling
from lorad.protocol.calls import Generated
from lorad.protocol.connection import Connection
from lorad.rl.data import Example
from lorad.spec.model import Rollout as RolloutSpec


def sample(session: Session) -> Rollout:
    """Return `prompts_per_step` groups of `group_size` samples, made now or by the sampling ahead.

    Raises LoradError when any token is another version's, or the version is older than
    `rollout.max_staleness` allows.
    """
    state = session.state
    if session.ahead is not None:
        with session.timed("sample"):
            rollout = session.ahead.take(state.step)
    else:
        now = plan(session, state.step, state.position, state.version, state.step, state.ratings)
        with session.timed("sample"):
            rollout = make(session, session.pool, now)
    refuse_stale(session, rollout)
    state.position = rollout.plan.position + rollout.consumed
    return rollout


def plan(
    session: Session, step: int, position: int, version: int, trained: int, ratings: Mapping[str, float]
) -> Plan:
    """Plan the samples for the step after `step`, by a version that has `trained` steps behind it."""
    empty = Plan(step, [], position, version, trained, ratings=ratings)
    return draw(session, empty, session.spec.data.prompts_per_step)


def make(session: Session, pool: Connection, planned: Plan) -> Rollout:
    """Make the samples as planned. Reads only what does not change in the session, so that any thread may.

    With algorithm.dynamic_sampling more prompts are sampled until enough groups are worth training on. They
    are taken in the order of the data, whatever order they end in.
    """
    started = time.perf_counter()
    refill = session.spec.algorithm.refill
    size = session.spec.algorithm.group_size
    count = len(planned.examples)
    job = SampleJob(planned, size, sampling(session), session.spec.seed)
    groups, generated, scoring = complete(session, pool, job)
    calls = [generated]
    places = planned.places
    if refill is None:
        return Rollout(
            plan=planned,
            groups=groups,
            places=places,
            consumed=planned.looked,
            sampled=count,
            tokens=generated.tokens,
            seconds=time.perf_counter() - started,
            waited=generated.waited,
            scoring=scoring,
        )
    rated = scoring.scores()
    scores = [rated[start : start + size] for start in range(0, len(rated), size)]
    drawn = planned
    while True:
        sampled = len(groups)
        good = [index for index in range(sampled) if _is_worth(session, groups[index], scores[index])]
        missing = count - len(good)
        failed = [score.value is None for group in scores for score in group]
        ends_run = sum(failed) > session.spec.max_failures * len(failed)
        if missing <= 0 or len(calls) == refill.max_batches or ends_run:
            break
        further = min(count, math.ceil(missing * sampled / max(len(good), 1)))
        if session.train_data.size is not None and drawn.looked + further > session.train_data.size:
            break
        drawn = draw(session, replace(planned, looked=drawn.looked), further)
        more, generated, scoring = complete(session, pool, replace(job, plan=drawn))
        calls.append(generated)
        groups = groups + more
        rated = scoring.scores()
        scores += [rated[start : start + size] for start in range(0, len(rated), size)]
        places = places + drawn.places
    others = [index for index in range(sampled) if index not in set(good)]  # they count in the normaliser
    chosen = sorted([*good[:count], *others[: max(missing, 0)]])
    consumed = places[chosen[-1]] + 1 if missing <= 0 else drawn.looked
    unused = [index for index in range(sampled) if index not in set(chosen) and places[index] < consumed]
    return Rollout(
        plan=planned,
        groups=[groups[index] for index in chosen],
        places=[places[index] for index in chosen],
        consumed=consumed,
        sampled=sampled,
        tokens=sum(each.tokens for each in calls),
        seconds=time.perf_counter() - started,
        waited=sum(each.waited for each in calls),
        scoring=Scoring.of([score for index in chosen for score in scores[index]]),
        left_out=dict(chain.from_iterable(rate(groups[i], scores[i]).items() for i in unused)),
    )


def _is_worth(session: Session, group: list[Sample], scores: list[Score]) -> bool:
    """Return whether a group teaches: its rewards differ, or their mean is within the bounds."""
    refill = session.spec.algorithm.refill
    earned, scored = worth(session.spec, group, scores)
    if earned.size < 2 or refill is None:
        return False
    if refill.keep is not None:
        mean = np.mean([s.value for s, has_reward in zip(scores, scored, strict=True) if has_reward])
        return bool(refill.keep[0] <= mean <= refill.keep[1])
    return bool(np.ptp(earned) > 0)


def refuse_stale(session: Session, rollout: Rollout) -> None:
    """Raise LoradError for samples of a version older than `rollout.max_staleness` allows."""
    staleness = rollout.plan.staleness
    limit = session.spec.rollout.max_staleness
    if staleness > limit:
        raise LoradError(
            f"the samples for step {rollout.plan.step + 1} are of {session.name_of(rollout.plan.version)}, "
            f"{staleness} versions old, and rollout.max_staleness is {limit}; nothing was trained on them",
            hint=f"`lorad resume {session.params.run}` samples them again.",
        )


def sampling(session: Session) -> Sampling:
    """Return how the run samples."""
    how = sampling_of(session.spec.rollout, session.tokenizer.eos_ids)
    return structs.replace(how, routes=session.records_routes)


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
    session: Session, pool: Connection, job: SampleJob, rewarder: Rewarder | None = None
) -> tuple[list[list[Sample]], Generated, Scoring]:
    """Return samples in order, by example, the pool's summary, and their scores, which are still computed.

    rewarder: None for the run's.
    """
    examples = job.plan.examples
    parts = session.parts(examples, "eval" if job.is_eval else "train")
    if len(parts) == 1:
        return _complete(parts[0][0], pool, job, rewarder)
    groups: list[list[Sample]] = [[] for _ in examples]
    total = Generated(0, 0, 0.0)
    scorings = list[tuple[Scoring, list[int]]]()
    for own, places in parts:
        part = replace(job.plan, examples=[examples[place] for place in places])
        played, generated, scoring = _complete(own, pool, replace(job, plan=part), rewarder)
        for place, group in zip(places, played, strict=True):
            groups[place] = group
        total = Generated(*map(add, structs.astuple(total), structs.astuple(generated)))
        scorings.append((scoring, places))
    return groups, total, Scoring.together(scorings, job.n)


def _complete(
    session: Session, pool: Connection, job: SampleJob, rewarder: Rewarder | None
) -> tuple[list[list[Sample]], Generated, Scoring]:
    """Do as `complete` does, for examples that are judged alike.

    A reward of user code gets samples as they end; without one all come together, which is cheaper.
    """
    n = job.n
    examples = job.plan.examples
    version = session.name_of(job.plan.version)
    rewarder = rewarder or session.rewarder
    job = replace(job, how=structs.replace(job.how, as_they_end=rewarder.runs_user_code))
    if (hosts := session.hosts) is not None:
        if isinstance(hosts, ProgramHosts):
            played = play_programs(session, hosts, pool, job)
        elif session.plays_freely:
            played = play_freely(session, hosts, pool, job)
        else:
            played = play(session.spec, version, hosts, partial(generate, pool), job)
        return *played, Scoring.of([s.episode.score for group in played[0] for s in group if s.episode])
    prompts = []
    for place, (example, own) in enumerate(zip(examples, job.seeds(), strict=True)):
        seeds = np.array([seed(0) for seed in own], np.uint64)
        prompts.append(Prompt(str(place), np.array(example.tokens, np.int32), seeds))
    scoring = rewarder.scoring([n] * len(prompts))
    samples: dict[int, Sample] = {}
    count = job.count()

    def ended(prompt: int, index: int, chunks: list[Chunk]) -> None:
        sample = _sample(session, examples[prompt], index, chunks)
        samples[prompt * n + index] = sample
        count.add(ended=1)
        scored = sample.for_reward(session.tokenizer, raw=rewarder.wants_raw)
        scoring.add(prompt * n + index, scored)

    generated = generate(pool, version, prompts, job.how, ended, count)
    places = range(0, n * len(prompts), n)
    return [with_prompts([samples[place + i] for i in range(n)]) for place in places], generated, scoring


def _sample(session: Session, example: Example, index: int, chunks: list[Chunk]) -> Sample:
    last = chunks[-1]
    if last.finish not in ("stop", "length"):
        problem = f"sample {index} of prompt {example.id} ended with {last.finish!r}"
        raise LoradError(f"{problem}; the engine's log says more")
    tokens = joined([c.tokens for c in chunks])
    logprobs = joined([c.logprobs for c in chunks])
    text = session.tokenizer.completion(tokens.tolist(), session.spec.rollout.stop)
    read = len(example.tokens)
    size = tokens.size
    routes, of_prompt = routes_of([with_routes(None, chunks, read, size)], [(read, size)])
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
