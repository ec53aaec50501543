"""Sampling that runs ahead of training, by up to `rollout.max_staleness` steps in a thread of its own.

The samples for step s (from 1) are requested as soon as the version of step s - 1 - max_staleness is
published, the first ones from version 0. So the step alone decides which version makes which samples,
whatever the timing: two runs of one spec do the same, and so does a resumed run.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from lorad.driver.sample import make, plan
from lorad.driver.session import Rollout, Session
from lorad.protocol.connection import Connection
from lorad.protocol.heartbeat import HEART


class Ahead:
    """Rollouts for the steps to come, scored meanwhile in a thread that ends with the context."""

    def __init__(self, session: Session, rollouts: Iterable[Rollout] = ()) -> None:
        """Start with the rollouts that a checkpoint has for the next steps, in order. Raises PoolLost."""
        self._session = session
        params = session.params
        self._limit = session.spec.rollout.max_staleness
        # by step, in order: how many steps the version that samples for it has behind it
        self._trained: dict[int, int] = {}
        self._futures: dict[int, Future[Rollout]] = {}
        self._position = session.state.position  # of the next prompt
        for rollout in rollouts:
            future = Future[Rollout]()
            future.set_result(rollout)
            self._trained[rollout.plan.step] = rollout.plan.trained
            self._futures[rollout.plan.step] = future
            self._position = rollout.plan.position + rollout.consumed
        self._pool = Connection(Path(params.pool_socket), run=params.run, attempt=params.attempt)
        self._thread = ThreadPoolExecutor(1, "sampler")

    def go_on(self, step: int) -> None:
        if step >= self._session.params.steps:  # a resume with more steps samples itself what it needs
            return
        for ahead in range(max([step - 1, *self._trained]) + 1, step + self._limit + 1):
            self._trained[ahead] = step
            state = self._session.state
            self._futures[ahead] = self._thread.submit(self._make, ahead, state.version, step, state.ratings)

    def take(self, step: int) -> Rollout:
        with HEART.waits():
            rollout = self._futures[step].result()
        del self._trained[step], self._futures[step]
        return rollout

    def put_back(self, rollout: Rollout) -> None:
        future = Future[Rollout]()
        future.set_result(rollout)
        self._trained = {rollout.plan.step: rollout.plan.trained, **self._trained}
        self._futures[rollout.plan.step] = future

    def of_earlier_versions(self) -> list[Rollout]:
        # the current version's are left out: after a resume, the version with its weights samples them again
        now = self._session.state.step
        with HEART.waits():
            return [self._futures[step].result() for step, trained in self._trained.items() if trained < now]

    def close(self) -> None:
        self._pool.abort()
        for judged in self._session.judged:
            judged.rewarder.close()  # it may be at work in the thread, for as long as user code likes
            if judged.hosts is not None:
                judged.hosts.training.close()  # and so may these
        self._thread.shutdown(cancel_futures=True)
        self._pool.close()

    def __enter__(self) -> Self:
        try:
            self.go_on(self._session.state.step)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make(self, step: int, version: int, trained: int, ratings: Mapping[str, float]) -> Rollout:
        """Make the next rollout. Runs in the thread, one step after another."""
        planned = plan(self._session, step, self._position, version, trained, ratings)
        rollout = make(self._session, self._pool, planned)
        self._position += rollout.consumed
        return rollout
