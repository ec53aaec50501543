"""Judge the expectations of a spec where the run comes to their steps."""

from lorad.driver.session import Session
from lorad.protocol.evals import judged


def judge_expectations(session: Session) -> None:
    """Journal and print the expectations that are judged after the present step, which is over."""
    step = session.state.step
    steps = session.params.steps
    figures: dict[str, float | None] = {**session.metrics}
    for evaluated_at, of_eval in session.evals[-1:]:
        figures |= of_eval if evaluated_at == step else {}
    for expectation in session.spec.expect:
        if (steps if expectation.step is None else expectation.step) == step:
            expected = judged(expectation, steps, step, lambda _: figures, is_over=True)
            session.journal.append("expect", step, expected)
            print(expected.in_words, flush=True)
