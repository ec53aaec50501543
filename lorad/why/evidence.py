"""Judge data and evaluations: does what is measured say anything?"""

import math

from lorad.why.facts import Facts
from lorad.why.finding import Finding

_TWICE = 0.5  # share of rows that are there before
_WIDTH = 1.96  # standard errors of a 95 % interval
_WORSE = 1.05  # times the best held-out loss


def ended_badly(facts: Facts) -> Finding | None:
    """Find a run that failed, or that has made no step."""
    run = facts.run
    if run.reason in ("failed", "lost") and not facts.steps:
        says = f"It made no step: {run.detail.removesuffix('.')}."
        return Finding("no-step", "cause", says, {}, f"lorad logs {run.name}")
    if not facts.steps:
        doing = run.waiting or run.doing or run.state
        return Finding("no-step", "look", f"It has made no step yet: {doing}.", {}, f"lorad show {run.name}")
    return None


def leaking(facts: Facts) -> Finding | None:
    """Find held-out rows that are trained on."""
    begun = facts.run.begun
    if begun is None or not begun.rows.seen:
        return None
    seen = begun.rows.seen
    held_out = begun.rows.held_out
    return Finding(
        "leaking",
        "cause" if seen > held_out / 10 else "look",
        f"{seen} of {held_out} held-out rows are among those that are trained on: the evaluation tells what "
        "was learnt by heart.",
        {"seen": seen, "held_out": held_out},
        "data.eval=rows that data.train does not have",
    )


def duplicates(facts: Facts) -> Finding | None:
    """Find training data that are few rows many times over."""
    begun = facts.run.begun
    if begun is None or begun.rows.rows < 2:
        return None
    rows = begun.rows.rows
    distinct = begun.rows.distinct
    if 1 - distinct / rows < _TWICE:
        return None
    return Finding(
        "duplicates",
        "cause",
        f"data.train has {rows} rows, of which {distinct} differ: a step has the same prompt again and "
        "again.",
        {"rows": rows, "distinct": distinct},
        "leave out the rows that are there twice",
    )


def overfit(facts: Facts) -> Finding | None:
    """Find held-out completions that get less likely while those that are trained on get more likely."""
    held_out = [evaluation.nll for evaluation in facts.evals if evaluation.nll is not None]
    if len(held_out) < 3 or held_out[-1] < _WORSE * min(held_out) or facts.trend("loss") >= 0:
        return None
    best = min(
        (evaluation for evaluation in facts.evals if evaluation.nll is not None),
        key=lambda evaluation: evaluation.nll or 0.0,
    )
    return Finding(
        "overfit",
        "cause",
        f"The held-out loss is {held_out[-1]:.3g}, and was {best.nll:.3g} at step {best.step}, while the "
        "loss falls: it learns its rows by heart.",
        {"nll": held_out[-1], "best": best.nll or 0.0, "step": best.step},
        f"trainer.steps={best.step}" if best.step else f"trainer.lr={(facts.spec.trainer.lr or 0.0) / 10:g}",
    )


def few_trained(facts: Facts) -> Finding | None:
    """Find supervised rows of which hardly a token is trained."""
    tokens = facts.mean("tokens")
    trained = facts.mean("trained_tokens")
    if facts.spec.algorithm.kind == "rl" or not tokens or trained is None or trained > 0.01 * tokens:
        return None
    return Finding(
        "masked",
        "cause",
        f"{trained:.1f} of {tokens:.0f} tokens of a step are trained: the others are masked.",
        {"trained_tokens": trained, "tokens": tokens},
        f"lorad samples {facts.run.name}",
    )


def few_evals(facts: Facts) -> Finding | None:
    """Find evaluations of so few problems that what the run learnt is below their noise."""
    scores = [
        (evaluation.score, evaluation.problems)
        for evaluation in facts.evals
        if evaluation.score is not None and evaluation.problems
    ]
    learnt = (facts.end("reward") or 0.0) - (facts.start("reward") or 0.0)
    if len(scores) < 2 or not facts.learns or learnt <= 0:
        return None
    first, _ = scores[0]
    last, problems = scores[-1]
    if not (0 <= first <= 1 and 0 <= last <= 1):
        return None  # no share of right ones, whose noise is known
    # Agresti and Caffo, 2000: the difference of two shares, each with one right and one wrong one more
    before, after = ((score * problems + 1) / (problems + 2) for score in (first, last))
    width = _WIDTH * math.sqrt((before * (1 - before) + after * (1 - after)) / (problems + 2))
    if abs(after - before) > width or width < learnt:
        return None
    return Finding(
        "few-evals",
        "look",
        f"The evaluation went from {first:.3g} to {last:.3g} on {problems} problems, which is known to "
        f"+-{width:.2g} alone, while the reward rose by {learnt:.2g}: too few to tell.",
        {"first": first, "last": last, "problems": problems, "interval": width},
        f"eval.problems={math.ceil(problems * (2 * width / learnt) ** 2)}",
    )
