"""Held-out evaluation: greedy completions of fixed problems by the current version."""

from __future__ import annotations

from lorad.driver.sample import complete, sampling
from lorad.driver.session import Plan, Session
from lorad.protocol.heartbeat import HEART
from lorad.protocol.journal import EvalFact
from lorad.text import number


def is_due(session: Session) -> bool:
    """Before training, every `every` steps and after the last step."""
    every, step = session.spec.eval.every, session.state.step
    return bool(session.eval_data) and every > 0 and (step % every == 0 or not session.steps_left)


def evaluate(session: Session) -> float | None:
    """Return the mean reward of the samples that have one; None where all rewards failed."""
    HEART.work("evaluate")
    state = session.state
    wanted = Plan(state.step, session.eval_data, 0, state.version, state.step)
    groups, _ = complete(session, session.pool, wanted, 1, sampling(session, greedy=True))
    scores = session.rewarder.score([group[0].for_reward() for group in groups])
    values = [s.value for s in scores if s.value is not None]
    score, failed = sum(values) / len(values) if values else None, len(scores) - len(values)
    fact = EvalFact(version=state.version, score=score, problems=len(scores), failed=failed)
    session.journal.append("eval", state.step, fact)
    missing = f", {failed} rewards failed" if failed else ""
    print(f"eval at step {state.step}: {number(score) or '-'} on {len(values)} problems{missing}", flush=True)
    return score
