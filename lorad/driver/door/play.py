"""Episodes of agent programs: each speaks with the version of the plan through the door, until it returns."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from msgspec.structs import replace as changed

from lorad.driver.door.chains import Chains, Rows
from lorad.driver.sampling.free import first_failure
from lorad.driver.sampling.generate import Seed, count_of, generate, seed_of, seeds_of
from lorad.driver.session import Episode, Plan, Sample, Session
from lorad.envs.format import Format
from lorad.envs.programs import Play, Played, ProgramHosts, Programs
from lorad.protocol.batch import Chunk, Prompt, Sampling
from lorad.protocol.calls import Generated
from lorad.protocol.connection import Connection
from lorad.protocol.heartbeat import HEART, Count
from lorad.records.episodes import EpisodeEnd, Task
from lorad.rl.data import Example

_MOST = 256  # turns that are sampled at once
_MOST_PLAYERS = 1024  # episodes that are played at once


def play_programs(
    session: Session,
    hosts: ProgramHosts,
    pool: Connection,
    planned: Plan,
    n: int,
    how: Sampling,
    *,
    seed: int,
    is_eval: bool,
) -> tuple[list[list[Sample]], Generated]:
    """Play `n` episodes of each example; returns them in order, and the sums of the pool's summaries.

    One whose program fails is played again, `env.retry` times at most.
    """
    programs = hosts.evals if is_eval else hosts.training
    count = count_of(planned, n, is_eval=is_eval)
    speakers = _Speakers(session, pool, session.name_of(planned.version), how, count, programs.door)
    seeds = seeds_of(seed, planned, n)
    env = session.spec.env
    together = min(env.workers * env.concurrency, _MOST_PLAYERS, n * len(planned.examples))
    with ThreadPoolExecutor(together, "episode") as players:
        try:
            with HEART.waits():
                futures = [
                    [
                        players.submit(
                            speakers.play,
                            hosts.format,
                            programs,
                            example,
                            index,
                            mine,
                            Task(example.row, seed_of(seed, 0, example.id, 0)),
                        )
                        for index, mine in enumerate(some)
                    ]
                    for example, some in zip(planned.examples, seeds, strict=True)
                ]
                first_failure([future for group in futures for future in group])
            return [[future.result() for future in group] for group in futures], speakers.made
        finally:
            players.shutdown(wait=False, cancel_futures=True)
            speakers.close()


class _Speakers:
    """Threads in which the model speaks, each with a connection of its own, and the door that asks them."""

    def __init__(
        self,
        session: Session,
        pool: Connection,
        version: str,
        how: Sampling,
        count: Count,
        door: Path | None,
    ) -> None:
        from lorad.driver.door.door import Door  # aiohttp, where it is needed alone

        self._session = session
        self._pool = pool
        self._version = version
        self._how = how
        self._count = count
        self._threads = ThreadPoolExecutor(_MOST, "episode-turn")
        self._door = Door(self._threads, door)
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self.made = Generated(0, 0, 0.0)

    def close(self) -> None:
        """Break off what is under way, if anything is."""
        self._door.close()
        self._pool.abort_others()
        self._threads.shutdown()
        self._pool.close_others()

    def play(
        self, format: Format, programs: Programs, example: Example, index: int, seed: Seed, task: Task
    ) -> Sample:
        """Play an episode, again where its program fails. Raises what the pool raised.

        One that was lost with others is played again alone, which does not count as a retry.
        """
        from lorad.driver.door.door import Visit

        spec = self._session.spec
        assert spec.env.max_tokens is not None  # fitted to the model
        sampling = {
            "model": self._version,
            "temperature": self._how.temperature,
            "top_p": self._how.top_p,
            "max_tokens": self._how.max_new_tokens,
        }
        tries = 1 + spec.env.retry
        alone = False
        while tries:
            visit = Visit(
                chains=Chains(format),
                version=self._version,
                how=self._how,
                turns=spec.env.turns,
                max_tokens=spec.env.max_tokens,
                form=self._session.tokenizer.call_form,
                speak=partial(self._speak, seed),
                text_of=self._text_of,
            )
            played = programs.play(Play(self._door.let_in(visit), example.row, sampling), alone=alone)
            self._door.send_away(visit)
            if visit.failed is not None:
                raise visit.failed
            rows = visit.chains.rows()
            if not played.error and not rows.turns:
                played = Played(error="it returned without a request", seconds=played.seconds)
            if not played.error:
                break
            tries -= not played.is_shared
            alone = alone or played.is_shared
        self._count.add(ended=1)
        return _sample(example, index, self._version, task, rows, played, visit.refused)

    def _speak(self, seed: Seed, context: list[int], turn: int, most: int) -> list[Chunk]:
        if not hasattr(self._of_thread, "pool"):
            self._of_thread.pool = self._pool.another()
        answer: list[Chunk] = []
        generated = generate(
            self._of_thread.pool,
            self._version,
            [Prompt("0", np.array(context, np.int32), np.array([seed(turn)], np.uint64))],
            changed(self._how, max_new_tokens=most),
            lambda _place, _index, chunks: answer.extend(chunks),
            self._count,
        )
        with self._lock:
            self.made = self.made.beside(generated)
        return answer

    def _text_of(self, tokens: list[int]) -> str:
        text = self._session.tokenizer.with_calls(tokens)
        stops = self._session.spec.rollout.stop
        return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def _sample(
    example: Example, index: int, version: str, task: Task, rows: Rows, played: Played, refused: str
) -> Sample:
    """Make a sample of an episode; a program's reward counts as that of its last turn."""
    turns = rows.turns
    end: EpisodeEnd = "done"
    if played.error:
        end = "failed"
    elif refused:
        end = "turns" if refused == "turns" else "tokens"
    elif played.is_limited:
        end = "turns"
    elif turns[-1].finish == "length":
        end = "length"
    if turns:
        turns[-1] = changed(turns[-1], reward=played.reward or 0.0, seconds=played.seconds)
    if rows.prompt is not None:
        text, tokens = rows.prompt
        example = changed(example, prompt=text, tokens=tokens)
    episode = Episode(task, turns, end, played.metrics, played.error)
    return Sample(
        example=example,
        index=index,
        version=version,
        tokens=rows.tokens,
        logprobs=rows.logprobs,
        finish="length" if end in ("length", "tokens") else "stop",
        text=episode.text,
        sampled=rows.sampled,
        episode=episode,
        forks=rows.forks,
        routes=rows.routes.tokens,
        prompt_routes=rows.routes.prompts,
    )
