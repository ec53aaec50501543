"""Episodes that wait for nothing but their own turns: where a call of the pool cannot be repeated bit for bit
anyway.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from lorad.driver.sampling.episodes import LiveEpisode, begun, earn, hear, sample_of
from lorad.driver.sampling.generate import count_of, generate, seed_of, seeds_of
from lorad.driver.session import Plan, Sample, Session
from lorad.envs.child import EpisodeAnswer
from lorad.envs.host import EnvironmentHost, Hosts
from lorad.protocol.batch import Prompt, Sampling
from lorad.protocol.calls import Generated
from lorad.protocol.connection import Connection
from lorad.protocol.heartbeat import HEART
from lorad.records.episodes import Task

_MOST = 256  # episodes under way at once


def play_freely(
    session: Session,
    hosts: Hosts,
    pool: Connection,
    planned: Plan,
    n: int,
    how: Sampling,
    *,
    seed: int,
    is_eval: bool,
) -> tuple[list[list[Sample]], Generated]:
    """Play `n` episodes of each example with the plan's version; returns them in order, and the sums of the
    pool's summaries.

    The episodes of an example begin when the environments of all of them have, since they begin alike.
    """
    players = _Players(session, hosts, pool, planned, n, how, seed=seed, is_eval=is_eval)
    try:
        with HEART.waits():  # for environments and the pool
            groups = players.play()
    finally:
        players.close()
    return groups, players.made


class _Players:
    """Threads, each with an episode at a time and a connection of its own."""

    def __init__(
        self,
        session: Session,
        hosts: Hosts,
        pool: Connection,
        planned: Plan,
        n: int,
        how: Sampling,
        *,
        seed: int,
        is_eval: bool,
    ) -> None:
        self._session = session
        self._format = hosts.format
        self._pool = pool
        self._how = how
        self._n = n
        self._host: EnvironmentHost = hosts.evals if is_eval else hosts.training
        self._count = count_of(planned, n, is_eval=is_eval)
        self._version = session.name_of(planned.version)
        self._examples = [*planned.examples]
        self._episodes = [
            [
                LiveEpisode(place, index, mine, self._host.new(Task(e.row, seed_of(seed, 0, e.id, 0))))
                for index, mine in enumerate(some)
            ]
            for place, (e, some) in enumerate(zip(planned.examples, seeds_of(seed, planned, n), strict=True))
        ]
        self._resets: list[dict[int, EpisodeAnswer]] = [{} for _ in self._examples]
        self._threads = ThreadPoolExecutor(min(_MOST, n * len(self._examples)), "episode")
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._futures: list[Future[None]] = []
        self.made = Generated(0, 0, 0.0)

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
        self._examples[episode.place] = begun(self._session, self._format, example, group, resets, self._how)
        live = [one for one in group if one.end is None]
        self._count.add(ended=len(group) - len(live))
        self._futures += [self._threads.submit(self._play, one) for one in live]

    def _play(self, episode: LiveEpisode) -> None:
        turn = 0
        while episode.end is None:
            if not hasattr(self._of_thread, "pool"):
                self._of_thread.pool = self._pool.another()
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
                self.made = self.made.beside(generated)
            hear(self._session, self._format, episode, self._host.answer(episode.heard), self._how)
            turn += 1
        if episode.heard.at_limit:
            earn(episode, self._host.answer(episode.heard))
        self._count.add(ended=1)


def first_failure(futures: Sequence[Future[Any]]) -> None:
    """Wait for all, or until one raises; raises that."""
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        future.result()
