"""Losses in torch for `algorithm.loss`: their derivative by autograd.

Torch is imported by the process of such a loss alone. The processes of an advantage in the same file and of a
loss in numpy do without, which saves each of them seconds.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from lorad.errors import LoradError

_Loss = Callable[..., Any]


def differentiated(loss: _Loss | None = None, *, stops: bool = False) -> Any:
    """Decorate a loss that takes torch tensors and returns a scalar, so that it returns (value, derivative).

        @differentiated
        def loss(logprobs, old, advantages, mask):
            ratio = (logprobs - old).exp()
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            return -surrogate[mask].mean()

    With `stops` the gradient stops somewhere on purpose (`detach`), so that it is not the derivative of the
    value and cannot be compared with finite differences.
    """
    if loss is None:
        return functools.partial(differentiated, stops=stops)

    @functools.wraps(loss)
    def derived(**arguments: Any) -> tuple[float | None, np.ndarray]:
        import torch

        tensors = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
        }
        logprobs = tensors["logprobs"].requires_grad_()
        value = loss(**tensors)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            hint = "Return a mean or a sum of what was computed from `logprobs`."
            raise LoradError(f"{loss.__name__} returned no scalar that depends on logprobs", hint=hint)
        (derivative,) = torch.autograd.grad(value.reshape(()), logprobs)
        return (None if stops else value.item()), derivative.numpy()

    derived.lorad_prepare = functools.partial(importlib.import_module, "torch")  # type: ignore[attr-defined]
    return derived
