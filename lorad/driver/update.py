"""What every step that trains does: a gradient, and the optimizer's step on it where both are finite."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from lorad.driver.session import Session
from lorad.protocol.batch import Gradients
from lorad.protocol.calls import ForwardBackward, Nothing, OptimStep, Stepped
from lorad.rl.schedule import learning_rate


@dataclass(frozen=True)
class Update:
    """One update.

    stats: None where nothing was computed, or it was not finite.
    step: the pool's answer to the optimizer's step; None where it made none.
    is_finite: False where loss or gradient was not, so that the update was skipped.
    """

    stats: Gradients | None = None
    step: Stepped | None = None
    is_finite: bool = True


def update(
    session: Session,
    work: ForwardBackward | None,
    rate: float,
    *,
    has_gradient: bool | Callable[[Gradients], bool] = True,
) -> Update:
    """Do one update; without a gradient the optimizer makes no step (algorithm.skip_empty_updates).

    Adam's momentum and weight decay would move the weights by themselves. What is not finite changes nothing
    either.

    work: None where there is nothing to compute.
    has_gradient: False where it is zero for certain; or a function that tells from a finite loss.
    """
    skips = session.spec.algorithm.skip_empty_updates
    optimizer_step = OptimStep(rate, session.spec.trainer.max_grad_norm)
    if work is None:
        return Update(step=None if skips else session.pool.call("optim_step", optimizer_step))
    stats: Gradients = session.pool.call("forward_backward", work)
    if stats.halved_to:
        session.tokens_per_microbatch = stats.halved_to
        session.warn(
            f"the device had no memory for a micro-batch; they have {stats.halved_to} tokens from now on "
            "(trainer.tokens_per_microbatch)"
        )
    is_finite = math.isfinite(stats.loss)
    teaches = has_gradient if isinstance(has_gradient, bool) else is_finite and has_gradient(stats)
    if not is_finite or (skips and not teaches):
        session.pool.call("discard_grads", Nothing())
        return Update(stats) if is_finite else Update(is_finite=False)
    step: Stepped = session.pool.call("optim_step", optimizer_step)
    return Update(stats, step) if step.applied else Update(is_finite=False)


def current_rate(session: Session) -> float:
    """Return the learning rate of the step that is made, the first of which has number 0."""
    trainer = session.spec.trainer
    assert trainer.lr is not None  # chosen when the run was made
    return learning_rate(
        session.state.step,
        lr=trainer.lr,
        schedule=trainer.schedule,
        horizon=trainer.schedule_steps or session.params.steps,
        warmup_steps=trainer.warmup_steps,
        min_lr=trainer.min_lr,
    )
