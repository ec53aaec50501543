"""What the evaluations of a run say so far: which are the best, and whether there is no progress any more.

Everything follows from the journal, so that a resume decides as if nothing had been.
"""

from collections.abc import Sequence

import msgspec

from lorad.driver.session import Session
from lorad.protocol.evals import LOWER_IS_BETTER, best_first, chosen, figures
from lorad.protocol.journal import EvalFact, Record
from lorad.spec.kept import EvalStop
from lorad.text import number


def restore(session: Session, facts: Sequence[Record], step: int) -> None:
    """Take up the evaluations of the surviving lineage until the checkpoint's step."""
    steps = 0
    for record in [fact for fact in facts if fact.step <= step or fact.kind == "attempt"]:
        data = record.data
        if record.kind == "attempt":
            steps = data["steps"]
        elif record.kind == "end" and data["reason"] == "completed" and record.step < steps:
            session.patient_from = record.step  # it had ended early, and was asked for more
        elif record.kind == "eval":
            add(session, record.step, msgspec.convert(data, EvalFact))
    session.standstill = _standstill(session)


def add(session: Session, step: int, fact: EvalFact) -> None:
    """Take in an evaluation, and see whether the run is to end."""
    session.evals.append((step, figures(fact.score, fact.nll, fact.accuracy, fact.sets)))
    session.standstill = _standstill(session)


def is_among_best(session: Session) -> bool:
    """Return whether the present step has one of the evaluations that checkpoint.keep_best keeps."""
    keep = session.spec.checkpoint.keep_best
    if not keep or not session.evals or session.evals[-1][0] != session.state.step:
        return False
    evaluations = [one for _, one in session.evals]
    metric = chosen(session.spec.checkpoint.best_by, evaluations)
    return metric is not None and len(evaluations) - 1 in best_first(metric, evaluations)[:keep]


def _standstill(session: Session) -> str:
    """Say that the evaluations have no new best any more, by eval.stop; "" while they have."""
    stop: EvalStop | None = session.spec.eval.stop
    metric = chosen(session.spec.checkpoint.best_by, [measured for _, measured in session.evals])
    if stop is None or metric is None:
        return ""
    sign = -1 if metric in LOWER_IS_BETTER else 1
    best = None
    best_step = 0
    since = 0
    for step, measured in session.evals:
        if (value := measured.get(metric)) is None:
            continue
        if best is None or sign * (value - best) > stop.min_delta:
            best = value
            best_step = step
            since = 0
        elif step > session.patient_from:
            since += 1
    if since < stop.patience:
        return ""
    by = f" by more than {number(stop.min_delta)}" if stop.min_delta else ""
    return f"{metric} was not better{by} than {number(best)}, of step {best_step}, in {since} evaluations"
