"""The loop of a run: sample, score, weigh, train, publish. It holds no model weights and never imports torch."""

from __future__ import annotations

import contextlib
import time

from lorad.driver import checkpoint, evaluate
from lorad.driver.begin import begin
from lorad.driver.publish import publish
from lorad.driver.record import record
from lorad.driver.sample import sample
from lorad.driver.score import score
from lorad.driver.session import Session
from lorad.driver.train import train
from lorad.driver.weigh import weigh
from lorad.errors import LoradError
from lorad.protocol.calls import Closed, Nothing
from lorad.protocol.journal import EndFact


def drive(session: Session) -> EndFact:
    """The whole attempt: why it ended, `completed` or `stopped`. Raises what stopped it otherwise."""
    info = begin(session)
    with session.ahead or contextlib.nullcontext():
        while session.steps_left and not session.stop.wanted:
            step(session)
        if session.state.step and not checkpoint.is_due(session):
            checkpoint.checkpoint(session)
    closed: Closed = session.pool.call("close", Nothing())
    if closed.base_checksum != info.base_checksum:
        raise LoradError("the base's weights changed during the run; nothing of this attempt can be trusted")
    done = f"{session.state.step} of {session.params.steps} steps"
    return EndFact("stopped", done) if session.steps_left else EndFact("completed", done)


def step(session: Session) -> None:
    """One optimizer step on samples of the current version, or of one that is not too old."""
    started = time.perf_counter()
    session.seconds = {}
    rollout = sample(session)
    scores = score(session, rollout)
    weighed = weigh(session, rollout, scores)
    trained = train(session, rollout, weighed)
    publish(session, session.state.step + 1)
    if session.ahead is not None:
        session.ahead.go_on(session.state.step + 1)
    record(session, rollout, weighed, trained, started)
    if evaluate.is_due(session):
        evaluate.evaluate(session)
    if checkpoint.is_due(session):
        checkpoint.checkpoint(session)
