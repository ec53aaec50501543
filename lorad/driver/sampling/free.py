"""Episodes that wait for nothing but their own turns, where calls of the pool differ in rounding anyway."""

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from lorad.driver.sampling.episodes import LiveEpisode, begin_episodes, earn, hear, sample_of
from lorad.driver.sampling.generate import SampleJob, generate
from lorad.driver.session import Sample, Session
from lorad.envs.child import EpisodeAnswer
from lorad.envs.host import EnvironmentHost, Hosts
from lorad.protocol.batch import Prompt
from lorad.protocol.calls import Generated
from lorad.protocol.connection import Connection
from lorad.protocol.heartbeat import HEART

_MOST = 256  # episodes under way at once


def play_freely(
    session: Session, hosts: Hosts, pool: Connection, job: SampleJob
) -> tuple[list[list[Sample]], Generated]:
    """Play episodes, each at its own pace; see `play` in `episodes.py`.

    The episodes of an example begin when the environments of all of them have, since they begin alike.
    """
    players = _Players(session, hosts, pool, job)
    try:
        with HEART.waits():  # for environments and the pool
            groups = players.play()
    finally:
        players.close()
    return groups, players.summary


class _Players:
    """Threads, each with an episode at a time and a connection of its own."""

    def __init__(self, session: Session, hosts: Hosts, pool: Connection, job: SampleJob) -> None:
        self._session = session
        self._format = hosts.format
        self._pool = pool
        self._how = job.how
        self._n = job.n
        self._host: EnvironmentHost = hosts.evals if job.is_eval else hosts.training
        self._count = job.count()
        self._version = session.name_of(job.plan.version)
        self._examples = [*job.plan.examples]
        self._episodes = [
            [LiveEpisode(place, index, seed, self._host.new(task)) for index, seed in enumerate(own)]
            for place, (task, own) in enumerate(zip(job.tasks(), job.seeds(), strict=True))
        ]
        self._resets: list[dict[int, EpisodeAnswer]] = [{} for _ in self._examples]
        self._threads = ThreadPoolExecutor(min(_MOST, self._n * len(self._examples)), "episode")
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._futures: list[Future[None]] = []
        self.summary = Generated(0, 0, 0.0)

    def play(self) -> list[list[Sample]]:
        """Raises what the pool raised, and then as soon as it does."""
        resets = [self._threads.submit(self._reset, e) for group in self._episodes for e in group]
        first_failure(resets)
        first_failure(self._futures)
        played = zip(self._examples, self._episodes, strict=True)
        return [[sample_of(example, self._version, e) for e in group] for example, group in played]

    def close(self) -> None:
        """Break off what is under way, if anything is."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.abort_others()
        self._threads.shutdown()
        self._pool.close_others()
        self._host.forget([episode.heard for group in self._episodes for episode in group])

    def _reset(self, episode: LiveEpisode) -> None:
        """Have the environment begin; the last of an example has its episodes played."""
        answer = self._host.answer(episode.heard)
        with self._lock:
            answers = self._resets[episode.place]
            answers[episode.index] = answer
            if len(answers) < self._n:
                return
        group = self._episodes[episode.place]
        example = self._examples[episode.place]
        resets = [answers[index] for index in range(self._n)]
        self._examples[episode.place] = begin_episodes(
            self._session.spec, self._format, example, group, resets, self._how
        )
        live = [one for one in group if one.end is None]
        self._count.add(ended=len(group) - len(live))
        self._futures += [self._threads.submit(self._play, one) for one in live]

    def _play(self, episode: LiveEpisode) -> None:
        turn = 0
        while episode.end is None:
            if not hasattr(self._of_thread, "pool"):
                self._of_thread.pool = self._pool.open_another()
            context = np.array(episode.context, np.int32)
            seed = np.array([episode.seed(turn)], np.uint64)
            generated = generate(
                self._of_thread.pool,
                self._version,
                [Prompt("0", context, seed)],
                self._how,
                lambda _place, _index, chunks: episode.say(chunks, self._format),
                self._count,
            )
            with self._lock:
                self.summary = self.summary.joined_with(generated)
            hear(self._session.spec, self._format, episode, self._host.answer(episode.heard), self._how)
            turn += 1
        if episode.heard.at_limit:
            earn(episode, self._host.answer(episode.heard))
        self._count.add(ended=1)


def first_failure(futures: Sequence[Future[Any]]) -> None:
    """Wait for all futures, or until one raises; raises that."""
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        future.result()
