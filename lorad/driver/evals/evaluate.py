"""Evaluate the current version on each set of held-out problems that is due."""

from typing import Any

from msgspec import structs

from lorad.driver.evals import progress
from lorad.driver.record import line_of, source_of, write_samples
from lorad.driver.sample import complete, sampling_of
from lorad.driver.sampling.generate import SampleJob
from lorad.driver.session import Plan, Problems, Session
from lorad.protocol.evals import SetScore, ks, pass_at
from lorad.protocol.heartbeat import HEART
from lorad.protocol.journal import EvalFact
from lorad.rl.data import EVAL_SEED
from lorad.spec.kept import MAIN
from lorad.text import number


def evaluation_due(session: Session, step: int | None = None) -> bool:
    """Return whether an evaluation is due after a step, the present one by default."""
    every = session.spec.eval.every
    step = session.state.step if step is None else step
    return bool(session.problems) and every > 0 and (step % every == 0 or step >= session.params.steps)


def evaluate(
    session: Session,
    nll: float | None = None,
    token_accuracy: float | None = None,
    pair_accuracy: float | None = None,
) -> None:
    """Evaluate the current version, and journal its figures; `session.standstill` says whether the run ends.

    nll, token_accuracy, pair_accuracy: see `EvalFact`.
    """
    HEART.work("evaluate")
    state = session.state
    scores: dict[str, SetScore] = {}
    lines: list[dict[str, Any]] = []
    for problems in session.problems:
        every = problems.settings.every or session.spec.eval.every
        if state.step % every == 0 or state.step >= session.params.steps:
            scores[problems.name], more = _evaluated(session, problems)
            lines += more
    HEART.tell("")
    main = scores.pop(MAIN, SetScore(None, 0, 0))
    path, digest = write_samples(session, state.step, lines, session.run_dir.evals) if lines else ("", "")
    figures = (main.score, main.problems, main.failed, nll, pair_accuracy, token_accuracy)
    fact = EvalFact(state.version, *figures, sets=scores, samples=path, samples_sha256=digest)
    session.journal.append("eval", state.step, fact)
    progress.add(session, state.step, fact)
    likely = "" if nll is None else f", nll {nll:.4f}"
    likely += "" if token_accuracy is None else f", {token_accuracy:.1%} of tokens right"
    missing = f", {main.failed} rewards failed" if main.failed else ""
    print(
        f"eval at step {state.step}: {number(main.score) or '-'} on {main.problems} problems{likely}{missing}"
        + "".join(f"; {name} {number(one.score) or '-'}" for name, one in scores.items()),
        flush=True,
    )


def _evaluated(session: Session, problems: Problems) -> tuple[SetScore, list[dict[str, Any]]]:
    """Sample and score the completions of one set; returns its score, and their lines."""
    settings = problems.settings
    examples = problems.examples
    if not problems.is_scored:
        return SetScore(None, len(examples), 0), []
    # the same seeds at each step and in each run: what differs are the versions
    planned = Plan(0, examples, 0, session.state.version, 0)
    rollout = session.spec.rollout
    how = structs.replace(
        sampling_of(rollout, tuple(session.tokenizer.eos_ids), greedy=True),
        max_new_tokens=settings.max_new_tokens or rollout.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p if settings.temperature else 1.0,
        top_k=settings.top_k if settings.temperature else 0,
    )
    job = SampleJob(planned, settings.n, how, EVAL_SEED, is_eval=True)
    groups, _, scoring = complete(session, session.pool, job, problems.rewarder)
    scores = scoring.scores()
    by_problem = [scores[start : start + settings.n] for start in range(0, len(scores), settings.n)]
    lines = list[dict[str, Any]]()
    for number_in_set, (group, of_group) in enumerate(zip(groups, by_problem, strict=True), 1):
        for sample, score in zip(group, of_group, strict=True):
            # whoever reads the lines of a set finds them by their beginning
            line: dict[str, Any] = {"set": problems.name, "problem": number_in_set}
            line |= {"step": session.state.step, **source_of(sample.example), **line_of(sample, score)}
            lines.append(line | {"length": sample.size})
    return summary(settings.n, settings.pass_at, [[s.value for s in some] for some in by_problem]), lines


def summary(n: int, passes: float, rewards: list[list[float | None]]) -> SetScore:
    """Return the score of a set.

    passes: the reward from which a completion has passed.
    rewards: by problem, the reward of each completion; None where it failed.
    """
    scored = [[value for value in some if value is not None] for some in rewards]
    values = [value for some in scored for value in some]
    counts = [(len(some), sum(value >= passes for value in some)) for some in scored]
    passed = {f"pass@{k}": share for k in ks(n) if (share := pass_at(k, counts)) is not None}
    score = sum(values) / len(values) if values else None
    return SetScore(score, len(rewards), sum(map(len, rewards)) - len(values), n, passed)
