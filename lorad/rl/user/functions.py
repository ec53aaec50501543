"""A user's own advantage and loss: what they are given, what they may return, and whether a derivative is
right. Pure. S samples in groups, one group for each prompt; T tokens of their completions, in order.

    def advantage(rewards, group_sizes, lengths, info): return [S] or [T]
    def loss(logprobs, sampler, old, ref, advantages, mask, lengths, groups): return value, derivative [T]

A function gets the arguments that it names, by keyword, as numpy arrays of its own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from lorad.errors import LoradError

_STEP = 1e-4  # nats, of a finite difference
_JITTER = 0.3  # nats, between the first and the second point where a derivative is checked
_TOKENS = 8  # at each of these points
_TOLERANCE = 1e-2  # relative
_LARGEST = 1e30  # training computes in fp32
_STOPS = (
    "Mend it, in float64. Where the gradient stops on purpose, return None for the value: "
    "then no derivative is checked."
)


class AdvantageInput(Struct, frozen=True, eq=False):
    """The samples of a step that have a reward; of each group there is at least one.

    rewards: The reward of each sample, [S].
    group_sizes: The samples of each group, int [G].
    lengths: The tokens of each sample, int [S].
    step: The number of the step.
    truncated: Whether rollout.max_new_tokens ended the sample, bool [S].
    sampler: The engine's log-probabilities, [T].
    old, ref: The log-probabilities of the trainer before the step's first update and of the reference,
        [T]; None where the step does not need them.
    """

    rewards: np.ndarray
    group_sizes: np.ndarray
    lengths: np.ndarray
    step: int
    truncated: np.ndarray
    sampler: np.ndarray
    old: np.ndarray | None = None
    ref: np.ndarray | None = None

    def arguments(self) -> dict[str, Any]:
        info = {
            "step": self.step,
            "truncated": self.truncated.astype(bool),
            **{name: _numbers(getattr(self, name)) for name in ("sampler", "old", "ref")},
        }
        return {
            "rewards": _numbers(self.rewards),
            "group_sizes": self.group_sizes.astype(np.int64),
            "lengths": self.lengths.astype(np.int64),
            "info": info,
        }


class LossInput(Struct, frozen=True, eq=False):
    """The samples of a minibatch.

    logprobs, sampler, old: The log-probabilities of the trainer now, of the engine, and of the trainer
        before the step's first update, [T].
    ref: The log-probabilities of the reference, [T], or None.
    advantages: The advantages, [T].
    mask: Which tokens are trained, bool [T].
    lengths: The tokens of each sample, int [S].
    groups: The samples of each group, int [G].
    """

    logprobs: np.ndarray
    sampler: np.ndarray
    old: np.ndarray
    ref: np.ndarray | None
    advantages: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    groups: np.ndarray

    def arguments(self) -> dict[str, Any]:
        numbers = ("logprobs", "sampler", "old", "ref", "advantages")
        return {
            **{name: _numbers(getattr(self, name)) for name in numbers},
            "mask": self.mask.astype(bool),
            "lengths": self.lengths.astype(np.int64),
            "groups": self.groups.astype(np.int64),
        }


def _numbers(array: np.ndarray | None) -> np.ndarray | None:
    """Copy in float64, so that finite differences have digits, and no call sees what another wrote."""
    return None if array is None else array.astype(np.float64)


def sample_of(kind: str, *, with_reference: bool) -> AdvantageInput | LossInput:
    """Make up a small step, to try a function of this kind: two prompts with three and two samples."""
    noise = np.random.default_rng(0)
    lengths = np.array([3, 1, 4, 2, 5], np.int64)
    tokens = int(lengths.sum())
    old = -noise.exponential(1.0, tokens)
    sampler = np.minimum(old + noise.normal(0, 0.01, tokens), 0.0)
    ref = np.minimum(old + noise.normal(0, 0.1, tokens), 0.0) if with_reference else None
    groups = np.array([3, 2])
    rewards = np.array([1.0, 0.0, 0.5, 0.0, 1.0])
    if kind == "advantage":
        return AdvantageInput(rewards, groups, lengths, 1, np.zeros(5, bool), sampler, old, ref)
    advantages = np.repeat([0.5, -0.5, 0.1, -0.7, 0.7], lengths)
    return LossInput(old, sampler, old, ref, advantages, np.ones(tokens, bool), lengths, groups)


def as_advantages(returned: Any, samples: int, tokens: int) -> np.ndarray:
    """Take what a function returned as finite advantages, float64 [S] or [T]. Raises LoradError."""
    array = _array(returned, "advantages")
    if array.shape not in ((samples,), (tokens,)):
        raise LoradError(
            f"returned advantages of shape {list(array.shape)} for {samples} samples with {tokens} tokens",
            hint="Return one number for each sample, or one for each token.",
        )
    return _finite(array, "advantage", "token" if array.size == tokens else "sample")


def as_loss(returned: Any, tokens: int) -> tuple[float | None, np.ndarray]:
    """Take what a function returned as a value or None, and a derivative, both finite. Raises LoradError."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        what = f"{len(returned)} values" if isinstance(returned, tuple | list) else type(returned).__name__
        raise LoradError(
            f"returned {what}, not a pair",
            hint="Return (value, derivative), or make the pair of a torch loss by "
            "`lorad.rl.user.autograd.differentiated`.",
        )
    value = returned[0]
    derivative = _array(returned[1], "a derivative")
    if value is not None:
        value = float(_finite(_array(value, "a value").reshape(-1), "value", "place").sum())
    if derivative.shape != (tokens,):
        problem = f"returned a derivative of shape {list(derivative.shape)} for {tokens} tokens"
        raise LoradError(problem, hint="Return the derivative of the value by each of `logprobs`.")
    return value, _finite(derivative, "derivative", "token")


def _array(returned: Any, what: str) -> np.ndarray:
    try:
        return np.asarray(returned, np.float64)
    except (TypeError, ValueError) as error:
        problem = f"returned {type(returned).__name__} for {what}, and that is no array of numbers: {error}"
        raise LoradError(problem, hint="Return numpy arrays.") from None


def _finite(array: np.ndarray, what: str, place: str) -> np.ndarray:
    """Return the array. Raises LoradError where a number is not finite."""
    wrong = np.flatnonzero(~(np.abs(array) < _LARGEST))  # NaN too
    if wrong.size:
        raise LoradError(
            f"the {what} of {place} {wrong[0]} is {array[wrong[0]]}, not a finite number"
            + f" (and {wrong.size - 1} more)" * (wrong.size > 1),
            hint="Look for a logarithm of 0, a division by 0 or an exponential of a large number.",
        )
    return array


def check_derivative(loss: Callable[..., Any], samples: LossInput, seed: int) -> None:
    """Compare derivatives with finite differences, at some tokens. Raises LoradError where one is wrong.

    Two points are looked at: the sample's own, and one nearby, since ratios of 1 hide much. A derivative at a
    kink is right where it lies between the ones of both sides. The seed draws tokens and the second point.
    """
    noise = np.random.default_rng(seed)
    moved = samples.logprobs + noise.uniform(-_JITTER, _JITTER, samples.logprobs.size)
    moved = -np.abs(moved) - 10 * _STEP  # still log-probabilities
    for point in (samples.logprobs.astype(np.float64), moved):
        value, derivative = as_loss(loss(**replace(samples, logprobs=point).arguments()), point.size)
        if value is None:
            return
        trained = np.flatnonzero(samples.mask)
        drawn = noise.permutation(trained)[: _TOKENS - 1].tolist()
        largest = [int(trained[np.abs(derivative[trained]).argmax()])] if trained.size else []
        for token in dict.fromkeys([*largest, *drawn]):
            _compare(loss, replace(samples, logprobs=point), token, value, derivative)


def _compare(
    loss: Callable[..., Any], samples: LossInput, token: int, value: float, derivative: np.ndarray
) -> None:
    sides = []
    for step in (-_STEP, _STEP):
        point = samples.logprobs.copy()
        point[token] += step
        moved, _ = as_loss(loss(**replace(samples, logprobs=point).arguments()), point.size)
        if moved is None:
            return
        sides.append((moved - value) / step)
    claimed = float(derivative[token])
    largest = max(abs(claimed), *map(abs, sides))
    slack = _TOLERANCE * largest + 1e-6 * float(np.abs(derivative).max()) + 1e-9 * max(1.0, abs(value))
    if not min(sides) - slack <= claimed <= max(sides) + slack:
        raise LoradError(
            f"the derivative at token {token} is {claimed:.6g}, but finite differences of the value give "
            f"{sum(sides) / 2:.6g}",
            hint=_STOPS,
        )
