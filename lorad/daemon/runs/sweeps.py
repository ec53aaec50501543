"""Successive halving (Jamieson & Talwalkar, 2016): at each rung the better runs of a sweep continue, the
others stop.

A rung is decided once all runs that are still in the race have made its steps, or are over; runs that are
further by then continue. The decision, the stops and the event are one transaction: a daemon that dies has
decided a rung once or not at all.

Samples from before the first update say nothing about a run, so no rung is before it and no such reward
counts. Of ETA runs one continues, and so does every run with exactly the score of the last one that does: a
name never decides between equal runs. (ASHA, Li et al., 2020, keeps by a threshold, too.)
"""

import logging
import math
import operator
import time
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from lorad.daemon.context import Context, spec_of
from lorad.daemon.guarded import each
from lorad.daemon.troubles import Item
from lorad.errors import SpecError
from lorad.protocol.preflight import SpecFacts
from lorad.records.requests import HalvingRequest
from lorad.records.sweeps import LOWER_IS_BETTER, Halving, Rung, Sweep
from lorad.spec.model import Spec
from lorad.states import EndReason, Move, RunState
from lorad.store import events, runs, sweeps
from lorad.store.metrics import mean_metric, newest_eval
from lorad.store.rows import RunRow

log = logging.getLogger("lorad.daemon")

_FIRST = 2  # the step whose samples come from an updated version, without staleness
LAST_STEPS = 5  # whose mean reward counts
_ETA = 2
_OF_EVALS = ("eval", "nll")
_OF_STEPS = ("reward", "loss")
_METRICS = (*_OF_EVALS, *_OF_STEPS)


class _Point(NamedTuple):
    """A run at a rung.

    score: None where it has none, as a run that failed early.
    in_race: it may continue.
    """

    run: RunRow
    score: float | None
    in_race: bool


def halving_of(wish: HalvingRequest, specs: Sequence[Spec], facts: Sequence[SpecFacts]) -> Halving:
    """Choose what the wish leaves open. Raises SpecError."""
    eta = wish.eta or _ETA
    steps = min(spec.trainer.steps for spec in specs)
    if not 1 < eta <= len(specs):
        hint = "It is more than 1 and at most as many as there are runs; 2 is usual."
        raise SpecError(f"--eta {eta:g} does not fit {len(specs)} runs", hint=hint)
    first = max(_FIRST + spec.rollout.max_staleness for spec in specs)
    if wish.rungs is not None and wish.min_steps is not None:
        raise SpecError("--rungs and --min-steps both say where rungs are", hint="Give one of the two.")
    if wish.rungs is not None:
        rungs = wish.rungs
    elif wish.min_steps is not None:
        rungs = [wish.min_steps]
        while (further := math.ceil(rungs[-1] * eta)) < steps:
            rungs.append(further)
    else:  # steps over powers of eta, as many as it takes to come from all runs to one
        count = math.ceil(math.log(len(specs), eta) - 1e-9)
        rungs = sorted({max(first, int(steps / eta**power)) for power in range(1, count + 1)})
    if not rungs or sorted(set(rungs)) != rungs or not 0 < rungs[0] <= rungs[-1] < steps:
        hint = "Give numbers of steps that grow, all of them before the last step, or raise trainer.steps."
        raise SpecError(f"rungs {', '.join(map(str, rungs)) or 'none'} do not fit {steps} steps", hint=hint)
    metric = _metric_of(wish, specs, facts, rungs[0])
    if metric in _OF_STEPS and rungs[0] < first:
        what = "rewards" if metric == "reward" else "losses"
        problem = f"rung {rungs[0]}: {what} up to step {first - 1} are from before the first update"
        raise SpecError(problem, hint=f"Begin with step {first} or later, or use --metric eval.")
    return Halving(eta, rungs, metric, wish.asha)


def _metric_of(
    wish: HalvingRequest, specs: Sequence[Spec], facts: Sequence[SpecFacts], first_rung: int
) -> str:
    """Choose the metric that ranks the runs: each has it by the first rung, alike. Raises SpecError."""
    every = max(spec.eval.every for spec in specs)
    kinds = {spec.algorithm.kind for spec in specs}
    has_evals = all(0 < spec.eval.every <= first_rung for spec in specs)
    is_scored = all(of_run.eval_scored for of_run in facts)
    is_likely = all(of_run.eval_likely for of_run in facts)
    of_steps = "reward" if kinds == {"rl"} else "loss"
    usual = "eval" if has_evals and is_scored else "nll" if has_evals and is_likely else of_steps
    metric = wish.metric or usual
    if metric not in _METRICS:
        hint = f"Choose one of: {', '.join(_METRICS)}."
        raise SpecError(f"--metric {metric}: there is no such metric", hint=hint)
    if metric in _OF_EVALS and not has_evals:
        problem = f"{every} gives no evaluation up to the first rung, step {first_rung}"
        hint = f"Set eval.every to {first_rung} or less, or use --metric {of_steps}."
        raise SpecError(problem, key="eval.every", hint=hint)
    if (metric == "eval" and not is_scored) or (metric == "nll" and not is_likely):
        lacks = "what the reward needs" if metric == "eval" else "completions"
        problem = f"the held-out rows lack {lacks}, so that evaluations have no {metric}"
        hint = f"Give rows that have it, or use --metric {usual}."
        raise SpecError(problem, key="data.eval", hint=hint)
    algorithms = [spec.algorithm for spec in specs]
    hint = "Give held-out rows by data.eval, with eval.every up to the first rung: evals can be compared."
    if metric in _OF_STEPS and (metric != of_steps or len(kinds) > 1):
        names = ", ".join(dict.fromkeys(str(algorithm.name) for algorithm in algorithms))
        raise SpecError(f"runs of {names} cannot be ranked by {metric}", key="algorithm.name", hint=hint)
    if metric == "loss" and any(other.preference != algorithms[0].preference for other in algorithms):
        problem = "losses of different preferences cannot be compared, and there is nothing else to rank by"
        raise SpecError(problem, key="algorithm.preference", hint=hint)
    return metric


def halve(ctx: Context) -> None:
    """Decide every rung that can be decided."""
    each(ctx, _decide, sweeps.undecided(ctx.store), lambda sweep: Item(f"sweep {sweep.sweep}"))


def _decide(ctx: Context, sweep: Sweep) -> None:
    """Decide the next rung of a sweep, unless some run has yet to reach it."""
    if (halving := sweep.halving) is None:
        return
    if halving.asha:
        _decide_each(ctx, sweep, halving)
        return
    metric = halving.metric
    step = halving.rungs[len(sweep.rungs)]
    members = sweeps.members(ctx.store, sweep.sweep)
    names = sweep.rungs[-1].kept if sweep.rungs else members
    entered = [runs.get(ctx.store, name) for name in names if name in set(members)]
    if not all(_has_reached(ctx, run, step, metric) for run in entered):
        return
    points = []
    for run in entered:  # who ended before it was done is out of the race; it has a score if it came that far
        score = None if run.step < step else _score_of(ctx, run.name, step, metric)
        has_failed = run.state == RunState.ENDED and run.reason != EndReason.COMPLETED
        points.append(_Point(run, score, not has_failed))
    sign = 1 if metric in LOWER_IS_BETTER else -1
    ranked = sorted(points, key=lambda p: (not p.in_race, p.score is None, sign * (p.score or 0.0)))
    most = math.ceil(len(ranked) / halving.eta)
    racing = [point for point in ranked if point.in_race]
    ties = [point for point in racing[most:] if point.score == racing[most - 1].score]
    kept = [*racing[:most], *ties]
    stopped = [point for point in ranked if point not in kept and point.run.state != RunState.ENDED]
    kept_names = [point.run.name for point in kept]
    stopped_names = [point.run.name for point in stopped]
    scores = {point.run.name: point.score for point in ranked}
    _stop_at(ctx, sweep, Rung(step, kept_names, stopped_names, scores, time.time()), stopped)


def _decide_each(ctx: Context, sweep: Sweep, halving: Halving) -> None:
    """Decide about every run at work by the last rung that it reached, among all that reached it so far.

    No run waits: the first to come to a rung continues, and is stopped before the next one if it is no longer
    among the best, one in eta (ASHA, Li et al., 2020, with stops in place of pauses). A run with exactly the
    score of the last of these continues.
    """
    members = {name: runs.get(ctx.store, name) for name in sweeps.members(ctx.store, sweep.sweep)}
    before = {rung.step: rung for rung in sweep.rungs}
    out = {name for rung in sweep.rungs for name in rung.stopped}
    over = [run for run in members.values() if run.state == RunState.ENDED]
    failed = {run.name for run in over if run.reason != EndReason.COMPLETED}
    rungs = []
    for step in halving.rungs:  # with the scores of runs that have reached them since the last look
        rung = before.get(step) or Rung(step, [], [], {}, 0.0)
        scored = rung.scores.keys() | out
        new = [run for name, run in members.items() if run.step >= step and name not in scored]
        reached = [run.name for run in new if _has_reached(ctx, run, step, halving.metric)]
        added = {name: _score_of(ctx, name, step, halving.metric) for name in reached}
        rungs.append(structs.replace(rung, scores=rung.scores | added))
    last = {name: rung.step for rung in rungs for name in rung.scores}
    for rung in rungs:
        scores = [score for score in rung.scores.values() if score is not None]
        scores.sort(reverse=halving.metric not in LOWER_IS_BETTER)
        most = math.ceil(len(rung.scores) / halving.eta)
        limit = scores[min(most, len(scores)) - 1] if scores else None  # the score of the last that continues
        better_than = operator.lt if halving.metric in LOWER_IS_BETTER else operator.gt
        stopped = []
        for name, score in rung.scores.items():
            is_worse = limit is not None and (score is None or better_than(limit, score))
            is_at_work = name in members.keys() - out and members[name].state != RunState.ENDED
            if is_at_work and last[name] == rung.step and is_worse:
                stopped.append(_Point(members[name], score, in_race=True))
        lost = [*rung.stopped, *(point.run.name for point in stopped)]
        kept = [name for name in rung.scores if name not in lost and name not in failed]
        earlier = before.get(rung.step)
        if rung.scores and (earlier is None or (earlier.scores, earlier.stopped) != (rung.scores, lost)):
            decided = structs.replace(rung, kept=kept, stopped=lost, at=time.time())
            _stop_at(ctx, sweep, decided, stopped)


def _has_reached(ctx: Context, run: RunRow, step: int, metric: str) -> bool:
    """Check whether everything that the run will report about its steps up to `step` is known."""
    if run.state == RunState.ENDED or run.step > step:
        return True
    if run.step < step:
        return False
    if metric not in _OF_EVALS or step % spec_of(run).eval.every != 0:
        return True
    return newest_eval(ctx.store, run.name, step, step) is not None


def _score_of(ctx: Context, name: str, step: int, metric: str) -> float | None:
    """Read the newest evaluation up to `step`, or the mean reward or loss of the last steps up to it, without
    steps before the first update.
    """
    if metric in _OF_EVALS:
        evaluation = newest_eval(ctx.store, name, 0, step)
        figures = {"eval": evaluation.score, "nll": evaluation.nll} if evaluation is not None else {}
        score = figures.get(metric)
    else:
        first = _FIRST + spec_of(runs.get(ctx.store, name)).rollout.max_staleness
        score = mean_metric(ctx.store, name, first, step, LAST_STEPS, metric)
    return score if score is not None and math.isfinite(score) else None


def _stop_at(ctx: Context, sweep: Sweep, rung: Rung, stopped: Sequence[_Point]) -> None:
    """Write a rung down and stop runs at it, both or neither."""
    scores = [score for name in rung.kept if (score := rung.scores[name]) is not None]
    best_of = min if sweep.halving and sweep.halving.metric in LOWER_IS_BETTER else max
    best = best_of(scores, default=None)
    step = rung.step
    with ctx.store.write():
        sweeps.decide(ctx.store, sweep.sweep, rung)
        events.append(ctx.store, None, "halving", {"sweep": sweep.sweep} | structs.asdict(rung))
        for point in stopped:
            why = (
                f"stopped by halving at step {step}: {_in_words(point.score)}, the best had {_in_words(best)}"
            )
            end(ctx, point.run, why)
    log.info("sweep %s: step %d keeps %s", sweep.sweep, step, ", ".join(rung.kept))
    ctx.loop.poke()


def end(ctx: Context, run: RunRow, why: str) -> None:
    """End a run as `lorad stop` does, with `why` as the detail; `settle` adds what the driver says."""
    if run.state in (RunState.QUEUED, RunState.PAUSED):
        runs.move(ctx.store, run.name, Move.END, reason=EndReason.STOPPED, detail=why)
        return
    if run.state != RunState.STOPPING:
        runs.move(ctx.store, run.name, Move.STOP, detail=why)
    if run.wanted != "kill":
        runs.set_fields(ctx.store, run.name, wanted="stop", detail=why)


def _in_words(score: float | None) -> str:
    return "no score" if score is None else f"{score:.3g}"
