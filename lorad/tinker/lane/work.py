"""Translates passes and steps of Tinker's client into calls of the pool, and measures the steps."""

import time
from collections.abc import Mapping

import numpy as np
from msgspec import Struct, field

from lorad.driver.attempt.metrics import trainer_metrics
from lorad.protocol.batch import Batch, Gradients, Optimizer
from lorad.protocol.calls import ForwardBackward, Logprobs, OptimStep
from lorad.protocol.calls import Stepped as StepDone
from lorad.tinker.losses import check, policy_of, value
from lorad.tinker.records import Pass, Passed, Step


def batch_of(work: Pass) -> Batch:
    """Make each datum a prompt of one token with the others behind it, whose labels are the targets."""
    ends = np.cumsum(work.lengths)
    behind = np.roll(work.tokens, -1)
    behind[ends - 1] = 0  # never read: every token of the datum stands before it
    ones = np.ones(work.lengths.size, np.int32)
    return Batch(
        prompts=work.tokens[ends - work.lengths],
        prompt_lengths=ones,
        group_sizes=ones,
        completions=behind,
        completion_lengths=work.lengths.astype(np.int32),
        labels=work.targets,
    )


def backward_of(work: Pass) -> ForwardBackward:
    """Return the pool's call for a pass with gradients. Raises ValueError for inputs unfit for the loss."""
    loss, targets = policy_of(work.loss, work.config, _checked(work))
    return ForwardBackward(batch_of(work), targets, loss, 1.0)


def forward_of(work: Pass) -> Logprobs:
    """Return the pool's call for a forward pass. Raises ValueError for inputs unfit for the loss."""
    _checked(work)
    return Logprobs("slot", batch_of(work))


def result_of(work: Pass, logprobs: np.ndarray, loss: float | None = None) -> Passed:
    """Return the result of a pass; the loss is computed here where the trainer returned none."""
    if loss is None:
        loss = value(work.loss, work.config, logprobs, _checked(work), work.lengths)
    metrics = {"loss:sum": loss, "tokens:sum": float(work.tokens.size)}
    return Passed(logprobs, work.lengths, metrics)


def step_of(work: Step) -> OptimStep:
    """Return the pool's call for a step. Raises ValueError for settings that no optimizer has."""
    numbers = (work.learning_rate, work.eps, work.weight_decay, work.grad_clip_norm)
    if not all(np.isfinite(numbers)) or min(numbers) < 0:
        raise ValueError("adam_params: a number is negative or not finite")
    if not 0 <= work.beta1 < 1 or not 0 <= work.beta2 < 1:
        raise ValueError("adam_params: a beta is not from 0 to below 1")
    optimizer = Optimizer((work.beta1, work.beta2), work.eps, work.weight_decay)
    return OptimStep(work.learning_rate, work.grad_clip_norm, optimizer=optimizer)


def _checked(work: Pass) -> Mapping[str, np.ndarray]:
    return check(work.loss, work.config, work.arrays, work.tokens.size)


class Passes(Struct):
    """Sums up the passes since the last step, for the metrics of the next step.

    Attributes:
        poisoned: Why the gradients are not what was asked for; "" while they are.
    """

    began: float = field(default_factory=time.perf_counter)
    datums: int = 0
    tokens: int = 0
    trained: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    poisoned: str = ""

    def add(self, work: Pass, gradients: Gradients) -> None:
        array = work.arrays.get("weights", work.arrays.get("advantages"))
        self.datums += work.lengths.size
        self.tokens += work.tokens.size
        self.trained += work.tokens.size if array is None else int(np.count_nonzero(array))
        self.loss += gradients.loss
        self.entropy += gradients.entropy

    def metrics(self, step: Step, done: StepDone) -> dict[str, float]:
        """Return the metrics of a step.

        Its `loss` is the mean over the tokens whose weight or advantage is not 0, its `seconds` are the time
        since the last step, and `on_request` says that a client asked for the step.
        """
        seconds = time.perf_counter() - self.began
        metrics = {
            "lr": step.learning_rate,
            "grad_norm": done.grad_norm,
            "updates": 1.0,
            "on_request": 1.0,
            "tokens": float(self.tokens),
            "trained_tokens": float(self.trained),
            "tokens_per_second": self.tokens / max(seconds, 1e-9),
            "seconds": seconds,
            "seconds_waited": done.waited,
        } | trainer_metrics([done])
        if self.trained:
            metrics["loss"] = self.loss / self.trained
        if self.tokens:
            metrics["entropy"] = self.entropy / self.tokens
        return metrics
