"""Find expectations of a spec that cannot be judged: unknown metrics, steps that are not made. Pure."""

from collections.abc import Iterator
from difflib import get_close_matches

from lorad.errors import SpecError
from lorad.protocol.evals import ks
from lorad.records.metrics import METRICS, NAMED
from lorad.rl.tasks import TASKS
from lorad.spec.data import MADE, single
from lorad.spec.kept import Expectation
from lorad.spec.model import Spec


def eval_metrics(spec: Spec) -> list[str]:
    """List the figures of evaluations that the run may measure, by their names in lorad.protocol.evals."""
    names = ["eval", *(f"eval/{name}" for name in spec.eval.sets)]
    names += [f"eval/{name}/pass@{k}" for name, rows in spec.eval.sets.items() for k in ks(rows.n)]
    if spec.algorithm.kind != "rl":
        names += ["nll"] + ["accuracy"] * (spec.algorithm.kind == "preference")
    return names


def wrong_expectations(spec: Spec) -> Iterator[SpecError]:
    """Yield an error for each expectation that the run could not come to."""
    if spec.expect and spec.algorithm.kind == "tinker":
        why = "the steps of this run are made when a client asks for them, and nothing says which is the last"
        yield SpecError(why, key="expect", hint="Leave it out.")
        return
    evaluated = eval_metrics(spec)
    kind = spec.algorithm.kind
    for place, expectation in enumerate(spec.expect):
        key = f"expect[{place}]"
        metric = expectation.metric
        bounds = [value for value in (expectation.low, expectation.high) if value is not None]
        if not bounds:
            yield SpecError("it has no bound", key=key, hint="Give low, high, or both.")
        if bounds != sorted(bounds):
            why = f"{bounds[0]:g} is more than high, {bounds[1]:g}"
            yield SpecError(why, key=f"{key}.low", hint="Exchange the two.")
        if metric in evaluated:
            yield from _wrong_evaluation(spec, expectation, key)
        else:
            # one that no step of the run has, or that steps alone have
            names = [name for name, row in METRICS.items() if not row.kinds or kind in row.kinds]
            if metric not in names and not (kind == "rl" and metric.startswith(tuple(NAMED))):
                near = get_close_matches(metric, [*evaluated, *names], 2)
                hint = f"Did you mean {' or '.join(near)}?" if near else ""
                hint = hint or f"Evaluations have {', '.join(evaluated)}."
                yield SpecError(f"{metric} is not measured by this run", key=f"{key}.metric", hint=hint)
            elif metric == "kl" and not spec.algorithm.kl_coef:
                problem = "it is measured where algorithm.kl.coef is more than 0"
                yield SpecError(problem, key=f"{key}.metric", hint="Set a coefficient, or leave it out.")
            elif expectation.step == 0:
                yield SpecError(
                    f"{metric} is of a step, and the first one is 1",
                    key=f"{key}.step",
                    hint="Set it to 1 or more, or expect a figure of evaluations, which begin before "
                    "training.",
                )
        steps = spec.trainer.steps
        if expectation.step is not None and expectation.step > steps:
            hint = f"Set it to {steps} or less, leave it out for the last step, or raise trainer.steps."
            yield SpecError(f"the run ends before it, after {steps} steps", key=f"{key}.step", hint=hint)


def _wrong_evaluation(spec: Spec, expectation: Expectation, key: str) -> Iterator[SpecError]:
    """Yield the error where nothing is evaluated at the step: `evaluation_due` of the driver says when."""
    every = spec.eval.every
    step = expectation.step
    if not every:
        hint = "Set eval.every, or expect a metric of steps, such as reward."
        yield SpecError("eval.every is 0, so that nothing is evaluated", key=f"{key}.metric", hint=hint)
        return
    train = single(spec.data.train)
    is_held_out = spec.data.eval is not None or train in TASKS or train.startswith(MADE)
    if not is_held_out and not expectation.metric.startswith("eval/"):
        problem = "data.eval names no held-out problems, so that nothing is evaluated"
        hint = "Give data.eval, or expect a metric of steps, such as reward."
        yield SpecError(problem, key=f"{key}.metric", hint=hint)
        return
    if expectation.metric.startswith("eval/"):
        name = expectation.metric.removeprefix("eval/").partition("/pass@")[0]
        every = spec.eval.sets[name].every or every
    if step is not None and step % every and step < spec.trainer.steps:
        near = sorted({step - step % every, min(step - step % every + every, spec.trainer.steps)})
        problem = f"there is no evaluation at {step}, but one at each {every} steps and after the last"
        hint = f"Set it to {' or '.join(map(str, near))}, or change eval.every."
        yield SpecError(problem, key=f"{key}.step", hint=hint)
