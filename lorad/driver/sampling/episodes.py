"""Episodes in lockstep: one call of the pool makes a turn of each, then the environments answer.

So the step alone decides what is computed with what, and a resume makes the same episodes again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add
from typing import Any

import numpy as np
from msgspec.structs import astuple
from msgspec.structs import replace as changed

from lorad.driver.sampling.generate import Ended, SampleJob, Seed, joined
from lorad.driver.sampling.routes import routes_of, with_prompts, with_routes
from lorad.driver.session import Episode, Sample
from lorad.envs.child import EpisodeAnswer
from lorad.envs.format import Format
from lorad.envs.host import HostedEpisode, Hosts
from lorad.envs.protocol import shown
from lorad.errors import LoradError, SpecError
from lorad.protocol.batch import Chunk, Prompt, Sampling
from lorad.protocol.calls import Generated
from lorad.protocol.heartbeat import Count
from lorad.records.episodes import LIMITS, EpisodeEnd, EpisodeTurn, Fork
from lorad.rl.data import Example
from lorad.spec.model import Spec

_Speak = Callable[[str, list[Prompt], Sampling, Ended, Count], Generated]
"""Samples by a version, as `generate` does."""


@dataclass
class LiveEpisode:
    """An episode under way.

    context: What the model reads next.
    parts: Tokens, and whether the policy sampled them.
    routes: The routes of each row, as far as they were computed.
    end: How it ended; None while it is under way.
    tools: The functions that the model may call, in OpenAI's form.
    scores_at_limit: Whether the environment says what the episode earns where a limit ends it.
    """

    place: int
    index: int
    seed: Seed
    heard: HostedEpisode
    context: list[int] = field(default_factory=list)
    parts: list[tuple[np.ndarray, bool]] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    routes: dict[int, np.ndarray | None] = field(default_factory=dict)
    turns: list[EpisodeTurn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    end: EpisodeEnd | None = None
    error: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    scores_at_limit: bool = False

    def fail(self, error: str) -> None:
        self.end = "failed"
        self.error = error

    def say(self, chunks: list[Chunk], format: Format) -> None:
        """Add a turn of the model."""
        tokens = joined([chunk.tokens for chunk in chunks])
        finish = chunks[-1].finish
        if finish not in ("stop", "length"):
            raise LoradError(f"a turn ended with {finish!r}; the engine's log says more")
        row = len(self.forks)
        self.routes[row] = with_routes(self.routes.get(row), chunks, len(self.context), tokens.size)
        self.context += tokens.tolist()
        self.parts.append((tokens, True))
        self.logprobs.append(joined([chunk.logprobs for chunk in chunks]))
        turn = format.turn(tokens.tolist(), finish, self.tools)
        self.turns.append(EpisodeTurn(turn.text, finish, tokens.size, row=row, calls=turn.calls))
        self.heard.turns.append(turn)

    def observe(self, text: str, tokens: list[int]) -> None:
        """Add what the environment wrote."""
        self.context += tokens
        self.parts.append((np.array(tokens, np.int32), False))
        self.turns[-1] = changed(self.turns[-1], observation=text, observed=len(tokens))

    def fork(self, text: str, tokens: list[int]) -> None:
        """Begin a new row with what replaces all that the model has read."""
        self.context = [*tokens]
        self.forks.append(Fork(sum(part.size for part, _ in self.parts), tokens))
        self.turns[-1] = changed(self.turns[-1], observation=text)


def play(
    spec: Spec, version: str, hosts: Hosts, speak: _Speak, job: SampleJob
) -> tuple[list[list[Sample]], Generated]:
    """Play episodes with a version; returns them in order, and the sums of the pool's summaries."""
    host = hosts.evals if job.is_eval else hosts.training
    planned = job.plan
    n = job.n
    how = job.how
    resets = host.begin([task for task in job.tasks() for _ in range(n)])
    answers = [answer for _, answer in resets]
    seeds = [own for group in job.seeds() for own in group]
    episodes = [
        LiveEpisode(i // n, i % n, own, heard)
        for i, (own, (heard, _)) in enumerate(zip(seeds, resets, strict=True))
    ]
    slices = [slice(place * n, place * n + n) for place in range(len(planned.examples))]
    examples = [
        begin_episodes(spec, hosts.format, example, episodes[part], answers[part], how)
        for example, part in zip(planned.examples, slices, strict=True)
    ]
    generated = Generated(0, 0, 0.0)
    turn = 0
    count = job.count()
    count.add(ended=sum(episode.end is not None for episode in episodes))
    while live := [episode for episode in episodes if episode.end is None]:
        more = _speak(hosts.format, partial(speak, version), live, turn, how, count)
        generated = Generated(*map(add, astuple(generated), astuple(more)))
        for episode, answer in zip(live, host.answers([e.heard for e in live]), strict=True):
            hear(spec, hosts.format, episode, answer, how)
        limited = [episode for episode in live if episode.heard.at_limit]
        for episode, answer in zip(limited, host.answers([e.heard for e in limited]), strict=True):
            earn(episode, answer)
        count.add(ended=sum(episode.end is not None for episode in live))
        turn += 1
    host.forget([episode.heard for episode in episodes])
    samples = [sample_of(examples[e.place], version, e) for e in episodes]
    return [with_prompts(samples[part]) for part in slices], generated


def begin_episodes(
    spec: Spec,
    format: Format,
    example: Example,
    episodes: Sequence[LiveEpisode],
    answers: Sequence[EpisodeAnswer],
    how: Sampling,
) -> Example:
    """Begin the episodes of an example; returns it with the words of its environment as prompt."""
    limit = spec.env.max_tokens
    assert limit is not None  # fitted to the model
    started = next((a for a in answers if a.messages is not None and not a.error), None)
    messages, tools = (None, []) if started is None else (started.messages, started.tools)
    if messages is not None:
        text, tokens = format.first(messages, tools)
        example = changed(example, prompt=text, tokens=tokens)
    for episode, answer in zip(episodes, answers, strict=True):
        if answer.error:
            episode.fail(answer.error)
        elif answer.messages is None:
            episode.fail("reset ended the episode: it returned an Observation without messages")
        elif (answer.messages, answer.tools) != (messages, tools):
            episode.fail("reset began with other words or tools than in another episode of the same row")
        elif len(example.tokens) + how.max_new_tokens > limit:
            episode.fail(f"its first observation of {len(example.tokens)} tokens leaves no room for a turn")
        episode.context = [*example.tokens]
        episode.tools = tools
        episode.scores_at_limit = answer.scores_at_limit
    return example


def _speak(
    format: Format,
    speak: Callable[[list[Prompt], Sampling, Ended, Count], Generated],
    live: Sequence[LiveEpisode],
    turn: int,
    how: Sampling,
    count: Count,
) -> Generated:
    """Have the model speak in each episode."""
    shared: dict[int, list[LiveEpisode]] = {}
    for number, episode in enumerate(live):  # those of one example begin with the same words
        shared.setdefault(episode.place if turn == 0 else number, []).append(episode)
    spoken = [*shared.values()]
    prompts = [
        Prompt(
            str(place),
            np.array(some[0].context, np.int32),
            np.array([episode.seed(turn) for episode in some], np.uint64),
        )
        for place, some in enumerate(spoken)
    ]
    return speak(prompts, how, lambda at, index, chunks: spoken[at][index].say(chunks, format), count)


def hear(spec: Spec, format: Format, episode: LiveEpisode, answer: EpisodeAnswer, how: Sampling) -> None:
    """Add the answer of the environment, and end the episode where nothing can follow."""
    messages = answer.messages
    limit = spec.env.max_tokens
    assert limit is not None  # fitted to the model
    turn = episode.turns[-1]
    episode.turns[-1] = changed(
        turn, reward=answer.reward, seconds=answer.seconds, tool_errors=answer.tool_errors
    )
    episode.metrics |= answer.metrics
    last = int(episode.parts[-1][0][-1])
    if answer.error:
        episode.fail(answer.error)
    elif messages is None:
        episode.end = "done"
    elif not answer.replaces and (turn.finish == "length" or not format.ends_turn(last)):
        episode.end = "length"
    elif len(episode.turns) == spec.env.turns:
        episode.end = "turns"
    else:
        try:
            if answer.replaces:
                _, context = format.first(messages, episode.tools)
            else:
                size = len(episode.context) - turn.tokens
                before = episode.context[:size], episode.context[size:]
                context = episode.context + format.following(messages, episode.tools, before)
        except SpecError as error:
            episode.fail(str(error))
            return
        size_before = len(episode.context)
        if len(context) + how.max_new_tokens > limit:
            episode.end = "tokens"
        elif context[:size_before] == episode.context:
            episode.observe(shown(messages), context[size_before:])
        else:
            episode.fork(shown(messages), context)
    episode.heard.at_limit = episode.scores_at_limit and episode.end in LIMITS


def earn(episode: LiveEpisode, answer: EpisodeAnswer) -> None:
    """Add what an episode earns that a limit has ended."""
    turn = episode.turns[-1]
    if answer.error:
        episode.fail(answer.error)
    reward = turn.reward + answer.reward
    seconds = turn.seconds + answer.seconds
    episode.turns[-1] = changed(turn, reward=reward, seconds=seconds)


def sample_of(example: Example, version: str, episode: LiveEpisode) -> Sample:
    assert episode.end is not None
    empty = np.zeros(0, np.int32)
    kept = Episode(
        episode.heard.task, episode.turns, episode.end, episode.metrics, episode.error, bool(episode.tools)
    )
    tokens = np.concatenate([empty, *(tokens for tokens, _ in episode.parts)])
    prompts = [len(example.tokens), *(len(fork.prompt) for fork in episode.forks)]
    behind = np.diff([0, *(fork.at for fork in episode.forks), tokens.size]).tolist()
    rows = [episode.routes.get(row) for row in range(len(prompts))]
    routes, of_prompts = routes_of(rows, list(zip(prompts, behind, strict=True)))
    return Sample(
        example=example,
        index=episode.index,
        version=version,
        tokens=tokens,
        logprobs=np.concatenate([np.zeros(0, np.float32), *episode.logprobs]),
        finish="length" if episode.end in ("length", "tokens") else "stop",
        text=kept.text,
        sampled=np.concatenate(
            [np.zeros(0, np.bool_), *(np.full(tokens.size, mine) for tokens, mine in episode.parts)]
        ),
        episode=kept,
        forks=tuple(episode.forks),
        routes=routes,
        prompt_routes=of_prompts,
    )
