"""An advantage and two losses of one's own, see docs/algorithms.md. `own-loss.yaml` names them.

A function gets the arguments that it names, as numpy arrays in float64: T tokens of S samples in G groups.
"""

import numpy as np

from lorad.rl.user.autograd import differentiated


def advantage(rewards, group_sizes):
    """[S]: how much better a sample is than the median of its group, which one lucky sample does not move."""
    groups = np.repeat(np.arange(group_sizes.size), group_sizes)
    medians = np.array([np.median(rewards[groups == group]) for group in range(group_sizes.size)])
    return rewards - medians[groups]


@differentiated
def loss(logprobs, old, advantages, mask):
    """PPO's ratio with a penalty on its square instead of a clip; torch makes the derivative."""
    ratio = (logprobs - old).exp()
    return (-ratio * advantages + 0.5 * (logprobs - old) ** 2)[mask].mean()


def same_loss(logprobs, old, advantages, mask):
    """Return the same loss with its derivative by each of `logprobs`, in numpy."""
    difference = logprobs - old
    ratio = np.exp(difference)
    derivative = -ratio * advantages + difference
    value = -ratio * advantages + 0.5 * difference**2
    return value[mask].mean(), np.where(mask, derivative, 0.0) / mask.sum()
