"""Episodes of agent programs: each speaks with the version of the plan through the door, until it returns."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from msgspec.structs import replace as changed

from lorad.driver.door.chains import Chains, Rows
from lorad.driver.sampling.free import first_failure
from lorad.driver.sampling.generate import SampleJob, Seed, generate
from lorad.driver.session import Episode, Sample, Session
from lorad.envs.format import Format
from lorad.envs.programs import Play, Played, ProgramHosts, Programs
from lorad.protocol.batch import Chunk, Prompt
from lorad.protocol.calls import Generated
from lorad.protocol.connection import Connection
from lorad.protocol.heartbeat import HEART
from lorad.records.episodes import EpisodeEnd, Task
from lorad.rl.data import Example

_MOST_TURNS = 256  # turns that are sampled at once
_MOST_PLAYERS = 1024  # episodes that are played at once


def play_programs(
    session: Session, hosts: ProgramHosts, pool: Connection, job: SampleJob
) -> tuple[list[list[Sample]], Generated]:
    """Play episodes of an agent program, see `play` in `lorad/driver/sampling/episodes.py`.

    An episode whose program fails is played again, `env.retry` times at most.
    """
    programs = hosts.evals if job.is_eval else hosts.training
    examples = job.plan.examples
    speakers = _Speakers(session, pool, job, programs.door)
    env = session.spec.env
    together = min(env.workers * env.concurrency, _MOST_PLAYERS, job.n * len(examples))
    with ThreadPoolExecutor(together, "episode") as players:
        try:
            with HEART.waits():
                futures: list[list[Future[Sample]]] = []
                for example, task, own in zip(examples, job.tasks(), job.seeds(), strict=True):
                    play = partial(speakers.play, hosts.format, programs, example, task)
                    futures.append([players.submit(play, *each) for each in enumerate(own)])
                first_failure([future for group in futures for future in group])
            return [[future.result() for future in group] for group in futures], speakers.summary
        finally:
            players.shutdown(wait=False, cancel_futures=True)
            speakers.close()


class _Speakers:
    """Threads in which the model speaks, each with its own connection, and the door that asks them."""

    def __init__(self, session: Session, pool: Connection, job: SampleJob, door: Path | None) -> None:
        from lorad.driver.door.door import Door  # aiohttp, where it is needed alone

        self._session = session
        self._pool = pool
        self._version = session.name_of(job.plan.version)
        self._how = job.how
        self._count = job.count()
        self._threads = ThreadPoolExecutor(_MOST_TURNS, "episode-turn")
        self._door = Door(self._threads, door)
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self.summary = Generated(0, 0, 0.0)

    def close(self) -> None:
        """Break off what is under way, if anything is."""
        self._door.close()
        self._pool.abort_others()
        self._threads.shutdown()
        self._pool.close_others()

    def play(
        self, format: Format, programs: Programs, example: Example, task: Task, index: int, seed: Seed
    ) -> Sample:
        """Play an episode, again where its program fails. Raises what the pool raised.

        An episode that was lost with others is played again alone, which does not count as a retry.
        """
        from lorad.driver.door.door import Visit

        spec = self._session.spec
        tokenizer = self._session.tokenizer
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
                form=tokenizer.call_form,
                speak=partial(self._speak, seed),
                text_of=lambda tokens: tokenizer.completion(tokens, spec.rollout.stop, calls=True),
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
            self._of_thread.pool = self._pool.open_another()
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
            self.summary = self.summary.joined_with(generated)
        return answer


def _sample(
    example: Example, index: int, version: str, task: Task, rows: Rows, played: Played, refused: str
) -> Sample:
    """Make a sample of an episode; a program's reward counts as that of its last turn."""
    turns = rows.turns
    end: EpisodeEnd = "done"
    if played.error:
        end = "failed"
    elif refused == "tokens":
        end = "tokens"
    elif refused or played.is_limited:
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
