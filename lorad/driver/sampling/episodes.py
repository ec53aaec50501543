"""Episodes in lockstep: a turn of all that are under way is one call of the pool, then the environments
answer.

So the step alone decides what is computed with what, and a resume makes the same episodes again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from msgspec.structs import replace as changed

from lorad.driver.sampling.generate import Seed, generate, joined, seed_of, seeds_of
from lorad.driver.session import Episode, Plan, Sample, Session
from lorad.envs.child import Answer
from lorad.envs.episode import EpisodeEnd, EpisodeTurn, Task
from lorad.envs.format import Format
from lorad.envs.host import Heard, Hosts
from lorad.envs.protocol import Turn, shown
from lorad.errors import LoradError, SpecError
from lorad.protocol.batch import Chunk, Prompt, Sampling
from lorad.protocol.calls import Generated
from lorad.protocol.connection import Connection
from lorad.rl.data import Example


@dataclass
class _Live:
    """An episode, as it grows. context: of all tokens so far. end: None while it is under way.

    parts: (tokens, whether the policy sampled them).
    """

    place: int
    index: int
    seed: Seed
    heard: Heard
    context: list[int] = field(default_factory=list)
    parts: list[tuple[np.ndarray, bool]] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    turns: list[EpisodeTurn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    end: EpisodeEnd | None = None
    error: str = ""

    def fail(self, error: str) -> None:
        self.end, self.error = "failed", error

    def say(self, chunks: list[Chunk], text_of: Callable[[list[int]], str]) -> None:
        """Add a turn of the model."""
        tokens = joined([chunk.tokens for chunk in chunks])
        finish = chunks[-1].finish
        if finish not in ("stop", "length"):
            raise LoradError(f"a turn ended with {finish!r}; the engine's log says more")
        self.context += tokens.tolist()
        self.parts.append((tokens, True))
        self.logprobs.append(joined([chunk.logprobs for chunk in chunks]))
        self.turns.append(EpisodeTurn(text_of(tokens.tolist()), finish, tokens.size))
        self.heard.turns.append(Turn(self.turns[-1].text, finish))

    def observe(self, text: str, tokens: list[int]) -> None:
        """Add what the environment wrote."""
        self.context += tokens
        self.parts.append((np.array(tokens, np.int32), False))
        self.turns[-1] = changed(self.turns[-1], observation=text, observed=len(tokens))


def play(
    session: Session,
    hosts: Hosts,
    pool: Connection,
    wanted: Plan,
    n: int,
    how: Sampling,
    *,
    seed: int,
    is_eval: bool,
) -> tuple[list[list[Sample]], Generated]:
    """Play `n` episodes of each example with the plan's version; returns them in order, and the sums of the
    pool's summaries.

    seed: where seeds of tasks and samples begin.
    """
    host = hosts.evals if is_eval else hosts.training
    version = session.name_of(wanted.version)
    tasks = [Task(e.row, seed_of(seed, 0, e.id, 0)) for e in wanted.examples for _ in range(n)]
    begun = host.begin(tasks)
    seeds = [one for some in seeds_of(seed, wanted, n) for one in some]
    episodes = [
        _Live(i // n, i % n, one, heard) for i, (one, (heard, _)) in enumerate(zip(seeds, begun, strict=True))
    ]
    examples = _first(session, hosts.format, wanted, episodes, [answer for _, answer in begun], n, how)
    made = Generated(0, 0, 0.0)
    turn = 0
    while live := [episode for episode in episodes if episode.end is None]:
        made = _speak(session, pool, version, live, turn, how, made)
        for episode, answer in zip(live, host.answers([e.heard for e in live]), strict=True):
            _hear(session, hosts.format, episode, answer, how)
        turn += 1
    host.forget([episode.heard for episode in episodes])
    samples = [_sample(examples[e.place], version, e) for e in episodes]
    return [samples[start : start + n] for start in range(0, len(samples), n)], made


def _first(
    session: Session,
    format: Format,
    wanted: Plan,
    episodes: Sequence[_Live],
    answers: Sequence[Answer],
    n: int,
    how: Sampling,
) -> list[Example]:
    """Begin the episodes of each example with the words of its environment; returns the examples with these
    as prompts.
    """
    limit = session.spec.env.max_tokens
    assert limit is not None  # fitted to the model
    found = []
    for place, example in enumerate(wanted.examples):
        mine = slice(place * n, place * n + n)
        said = next((a.messages for a in answers[mine] if a.messages is not None and not a.error), None)
        if said is not None:
            text, tokens = format.first(said)
            example = changed(example, prompt=text, tokens=tokens)
        for episode, answer in zip(episodes[mine], answers[mine], strict=True):
            if answer.error:
                episode.fail(answer.error)
            elif answer.messages is None:
                episode.fail("reset ended the episode: it returned an Observation without messages")
            elif answer.messages != said:
                episode.fail("reset began with other words than in another episode of the same row")
            elif len(example.tokens) + how.max_new_tokens > limit:
                episode.fail(
                    f"its first observation of {len(example.tokens)} tokens leaves no room for a turn"
                )
            episode.context = [*example.tokens]
        found.append(example)
    return found


def _speak(
    session: Session,
    pool: Connection,
    version: str,
    live: Sequence[_Live],
    turn: int,
    how: Sampling,
    made: Generated,
) -> Generated:
    """Have the model speak in each episode; returns what it made until now, these turns included."""
    shared: dict[int, list[_Live]] = {}
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
    text_of = partial(session.tokenizer.completion, stops=session.spec.rollout.stop)
    more = generate(
        pool, version, prompts, how, lambda at, index, chunks: spoken[at][index].say(chunks, text_of)
    )
    return Generated(
        made.samples + more.samples,
        made.tokens + more.tokens,
        made.seconds + more.seconds,
        made.waited + more.waited,
    )


def _hear(session: Session, format: Format, episode: _Live, answer: Answer, how: Sampling) -> None:
    """Add what the environment answered, and end the episode where nothing can follow."""
    spec, said = session.spec, answer.messages
    limit = spec.env.max_tokens
    assert limit is not None  # fitted to the model
    turn = episode.turns[-1]
    episode.turns[-1] = changed(turn, reward=answer.reward, seconds=answer.seconds)
    episode.metrics |= answer.metrics
    last = int(episode.parts[-1][0][-1])
    if answer.error:
        episode.fail(answer.error)
    elif said is None:
        episode.end = "done"
    elif turn.finish == "length" or not format.ends_turn(last):
        episode.end = "length"
    elif len(episode.turns) == spec.env.turns:
        episode.end = "turns"
    else:
        try:
            tokens = format.following(said)
        except SpecError as error:
            episode.fail(str(error))
            return
        if len(episode.context) + len(tokens) + how.max_new_tokens > limit:
            episode.end = "tokens"
        else:
            episode.observe(shown(said), tokens)


def _sample(example: Example, version: str, episode: _Live) -> Sample:
    assert episode.end is not None
    empty = np.zeros(0, np.int32)
    return Sample(
        example=example,
        index=episode.index,
        version=version,
        tokens=np.concatenate([empty, *(tokens for tokens, _ in episode.parts)]),
        logprobs=np.concatenate([np.zeros(0, np.float32), *episode.logprobs]),
        finish="length" if episode.end in ("length", "tokens") else "stop",
        text="".join(f"{turn.text}{turn.observation}" for turn in episode.turns),
        sampled=np.concatenate(
            [np.zeros(0, np.bool_), *(np.full(tokens.size, mine) for tokens, mine in episode.parts)]
        ),
        episode=Episode(episode.heard.task, episode.turns, episode.end, episode.metrics, episode.error),
    )
