"""The loop of a run: sample, score, weigh, train, publish; `supervised.py` has the steps of sft and dpo.

It holds no model weights and never imports torch.
"""

import contextlib
import time

from lorad.driver import checkpoint, supervised
from lorad.driver.begin import begin
from lorad.driver.evals.evaluate import evaluate, evaluation_due
from lorad.driver.evals.expectations import judge_expectations
from lorad.driver.evals.progress import is_among_best
from lorad.driver.preferences import Preferences
from lorad.driver.publish import publish, publish_changes, reset_reference
from lorad.driver.record import record
from lorad.driver.sample import sample
from lorad.driver.sampling.admission import remember
from lorad.driver.score import choose, score, too_many_failed
from lorad.driver.session import Session
from lorad.driver.train import Trained, adapt_kl, train
from lorad.driver.update import current_rate
from lorad.driver.weigh import gather, weigh
from lorad.errors import LoradError
from lorad.protocol.batch import LossStats
from lorad.protocol.calls import Nothing, SlotClosed
from lorad.protocol.journal import EndFact


def drive(session: Session) -> EndFact:
    """Run the whole attempt; returns why it ended, `completed` or `stopped`, and raises other causes."""
    info = begin(session)
    objective: supervised.Objective | None = None  # where the data hold the completions
    if session.spec.algorithm.kind == "sft":
        objective = supervised.Likelihood()
    elif session.spec.algorithm.kind == "preference":
        objective = Preferences(session, info)
    if not session.state.step:
        judge_expectations(session)
    with session.ahead or contextlib.nullcontext():
        while session.steps_left and not (session.stop.wanted or session.standstill):
            if objective is None:
                _step(session)
            else:
                supervised.step(session, objective)
            judge_expectations(session)
            _keep(session)
        if session.state.step and not checkpoint.is_written(session):
            publish_changes(session, session.state.step)
            checkpoint.checkpoint(session)
    closed: SlotClosed = session.pool.call("close", Nothing())
    if closed.base_checksum != info.base_checksum:
        raise LoradError("the base's weights changed during the run; nothing of this attempt can be trusted")
    done = f"{session.state.step} of {session.params.steps} steps"
    if session.standstill and session.steps_left:
        return EndFact("completed", f"{done}, ended early by eval.stop: {session.standstill}")
    return EndFact("stopped", done) if session.steps_left else EndFact("completed", done)


def _step(session: Session) -> None:
    """Make one step on samples of the current version, or of one that is not too old.

    Without an update there is no new version. Raises LoradError where too many rewards failed.
    """
    started = time.perf_counter()
    session.seconds = {}
    session.movement = {}
    rollout = sample(session)
    scores = score(session, rollout)
    scored = choose(session, rollout, scores)
    if error := too_many_failed(session, scores):
        # a checkpoint from which a resume makes this step again, and the step's samples to be read
        session.state.position = rollout.plan.position
        if session.ahead is not None:
            session.ahead.put_back(rollout)
        if session.state.step and not checkpoint.is_written(session):
            checkpoint.checkpoint(session)
        nothing = Trained(current_rate(session), [], LossStats(), None)
        record(session, rollout, scored, None, nothing, started)
        raise error
    weighed = weigh(session, rollout, scored, gather(session, rollout, scored))
    trained = train(session, rollout, scored, weighed)
    if trained.steps:
        session.state.changed = session.state.step + 1
        publish(session, session.state.step + 1)
    remember(session, rollout, scores)
    if session.ahead is not None:
        session.ahead.go_on(session.state.step + 1)
    record(session, rollout, scored, weighed, trained, started)
    adapt_kl(session, trained, weighed)
    reset_reference(session)
    session.state.critic_steps += bool(trained.critic)
    if evaluation_due(session):
        evaluate(session)


def _keep(session: Session) -> None:
    """Checkpoint a step where that is due. Raises LoradError after trainer.max_skipped_steps skipped steps.

    A resume counts them from zero, and begins with the data after the skipped steps.
    """
    count = session.state.skipped_steps
    is_endless = count >= session.spec.trainer.max_skipped_steps
    if is_endless:
        session.state.skipped_steps = 0
    if is_endless or checkpoint.is_due(session) or is_among_best(session):
        publish_changes(session, session.state.step)
        checkpoint.checkpoint(session)
    if is_endless:
        run = session.params.run
        raise LoradError(
            f"loss or gradient was not finite in {count} steps in a row up to step {session.state.step}; "
            "none was applied",
            hint=f"`lorad resume {run} trainer.lr=…` continues with the next data at a lower rate; "
            f"`lorad checkpoints {run}` lists where else it can begin.",
        )
