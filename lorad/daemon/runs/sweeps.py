"""Successive halving (Jamieson & Talwalkar, 2016): at each rung the better runs of a sweep continue, the
others stop.

A rung is decided once all runs that are still in it have made its steps, or are over; runs that are further
by then continue. The decision, the stops and the event are one transaction: a daemon that dies decides a rung
once or not at all.

What was sampled before the first update says nothing about a run, so that no rung is before it and no such
reward counts. Of ETA runs one continues, and so does every run with exactly the same score as the last one
that does: a name never decides between equal runs. (ASHA, Li et al., 2020, keeps by a threshold, too.)
"""

import logging
import math
import time
from typing import NamedTuple

from msgspec import structs

from lorad.client.requests import HalvingRequest
from lorad.daemon.context import Context, spec_of
from lorad.daemon.guarded import each
from lorad.daemon.troubles import Item
from lorad.errors import SpecError
from lorad.spec.model import Spec
from lorad.states import EndReason, Move, RunState
from lorad.store import events, runs, sweeps
from lorad.store.metrics import eval_score, mean_reward
from lorad.store.rows import Halving, Rung, RunRow, SweepRow

log = logging.getLogger("lorad.daemon")

LAST_STEPS = 5  # whose mean reward counts
_ETA = 2
_METRICS = ("eval", "reward")


class _Point(NamedTuple):
    """A run at a rung.

    score: None where there is none, as for a run that failed.
    """

    run: RunRow
    score: float | None
    in_race: bool


def halving_of(wish: HalvingRequest, specs: list[Spec]) -> Halving:
    """Choose what the wish leaves open. Raises SpecError."""
    eta, steps = wish.eta or _ETA, min(spec.trainer.steps for spec in specs)
    if not 1 < eta <= len(specs):
        hint = "It is more than 1 and at most as many as there are runs; 2 is usual."
        raise SpecError(f"--eta {eta:g} does not fit {len(specs)} runs", hint=hint)
    first = max(_first_telling(spec) for spec in specs)
    rungs = wish.rungs if wish.rungs is not None else _usual_rungs(eta, len(specs), steps, first)
    if not rungs or sorted(set(rungs)) != rungs or not 0 < rungs[0] <= rungs[-1] < steps:
        hint = "Give numbers of steps that grow, all of them before the last step, or raise trainer.steps."
        raise SpecError(f"rungs {', '.join(map(str, rungs)) or 'none'} do not fit {steps} steps", hint=hint)
    every = max(spec.eval.every for spec in specs)
    has_evals = all(0 < spec.eval.every <= rungs[0] for spec in specs)
    metric = wish.metric or ("eval" if has_evals else "reward")
    if metric not in _METRICS:
        raise SpecError(
            f"--metric {metric}: there is no such metric", hint=f"Choose one of: {', '.join(_METRICS)}."
        )
    if metric == "eval" and not has_evals:
        hint = f"Set eval.every to {rungs[0]} or less, or use --metric reward."
        raise SpecError(
            f"{every} gives no evaluation up to the first rung, step {rungs[0]}", key="eval.every", hint=hint
        )
    if metric == "reward" and rungs[0] < first:
        hint = f"Begin with step {first} or later, or use --metric eval."
        raise SpecError(
            f"rung {rungs[0]}: rewards up to step {first - 1} are from before the first update", hint=hint
        )
    return Halving(eta, rungs, metric)


def _first_telling(spec: Spec) -> int:
    """Find the first step whose samples may come from an updated version."""
    return 2 + spec.rollout.max_staleness


def _usual_rungs(eta: float, count: int, steps: int, first: int) -> list[int]:
    """Steps over powers of eta, as many as it takes to come from `count` runs to one;
    none is before `first`.
    """
    wanted = math.ceil(math.log(count, eta) - 1e-9)
    return sorted({max(first, int(steps / eta**power)) for power in range(1, wanted + 1)})


def halve(ctx: Context) -> None:
    """Decide every rung that can be decided."""
    each(ctx, _decide, sweeps.undecided(ctx.store), lambda sweep: Item(f"sweep {sweep.sweep}"))


def _decide(ctx: Context, sweep: SweepRow) -> None:
    """Decide the next rung of a sweep, unless some run has yet to reach it."""
    if (halving := sweep.halving) is None:
        return
    metric, step = halving.metric, halving.rungs[len(sweep.rungs)]
    there = set(sweeps.members(ctx.store, sweep.sweep))
    names = [name for name in _racing(ctx, sweep) if name in there]
    entered = [runs.get(ctx.store, name) for name in names]
    if not all(_has_reached(ctx, run, step, metric) for run in entered):
        return
    ranked = sorted((_point_at(ctx, run, step, metric) for run in entered), key=rank)
    most = math.ceil(len(ranked) / halving.eta)
    kept = _with_ties([point for point in ranked if point.in_race], most)
    _settle(ctx, sweep, step, ranked, kept)


def _racing(ctx: Context, sweep: SweepRow) -> list[str]:
    """List the runs that the last rung kept."""
    if sweep.rungs:
        return sweep.rungs[-1].kept
    return sweeps.members(ctx.store, sweep.sweep)


def _has_reached(ctx: Context, run: RunRow, step: int, metric: str) -> bool:
    """Check whether everything that the run will report about its steps up to `step` is known."""
    if run.state == RunState.ENDED or run.step > step:
        return True
    if run.step < step:
        return False
    every = spec_of(run).eval.every
    return (
        metric != "eval"
        or step % every != 0
        or _score_of(ctx, run.name, step, metric, at_step=True) is not None
    )


def _point_at(ctx: Context, run: RunRow, step: int, metric: str) -> _Point:
    """A run that ended before it was done is out of the race; it has a score if it came that far."""
    is_over = run.state == RunState.ENDED and run.reason != EndReason.COMPLETED
    score = None if run.step < step else _score_of(ctx, run.name, step, metric)
    return _Point(run, score, not is_over)


def rank(point: _Point) -> tuple[bool, bool, float]:
    return not point.in_race, point.score is None, -(point.score or 0.0)


def _with_ties(ranked: list[_Point], most: int) -> list[_Point]:
    """Take the first `most`, and those after them with the score of the last of these."""
    return [*ranked[:most], *(point for point in ranked[most:] if point.score == ranked[most - 1].score)]


def _score_of(ctx: Context, name: str, step: int, metric: str, *, at_step: bool = False) -> float | None:
    """The newest evaluation up to `step` (at_step: just there), or the mean reward of the last steps up to
    it, of those after the first update.
    """
    if metric == "eval":
        return _finite(eval_score(ctx.store, name, step if at_step else 0, step))
    first = _first_telling(spec_of(runs.get(ctx.store, name)))
    return _finite(mean_reward(ctx.store, name, first, step, LAST_STEPS))


def _finite(score: float | None) -> float | None:
    return score if score is not None and math.isfinite(score) else None


def _settle(ctx: Context, sweep: SweepRow, step: int, ranked: list[_Point], kept: list[_Point]) -> None:
    best = next((point.score for point in ranked if point.score is not None), None)
    stopped = [point for point in ranked if point not in kept and point.run.state != RunState.ENDED]
    rung = Rung(
        step=step,
        kept=[point.run.name for point in kept],
        stopped=[point.run.name for point in stopped],
        scores={point.run.name: point.score for point in ranked},
        at=time.time(),
    )
    with ctx.store.write():
        sweeps.decide(ctx.store, sweep.sweep, rung)
        events.append(ctx.store, None, "halving", {"sweep": sweep.sweep} | structs.asdict(rung))
        for point in stopped:
            end(
                ctx,
                point.run,
                f"stopped by halving at step {step}: {shown(point.score)}, the best had {shown(best)}",
            )
    log.info("sweep %s: step %d keeps %s", sweep.sweep, step, ", ".join(point.run.name for point in kept))
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


def shown(score: float | None) -> str:
    return "no score" if score is None else f"{score:.3g}"
