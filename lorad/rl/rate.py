"""The learning rate that fits a model and an algorithm: what `trainer.lr` is where it is not given. Pure.

LoRA takes about ten times the rate of full fine-tuning, nearly whatever its rank (Schulman et al., "LoRA
Without Regret", 2025). The exponents of the hidden size are those of `get_lr` in Tinker's cookbook
(hyperparam_utils.py), which were fitted on Llama and Qwen from 1B to 70B. Preference losses take a fiftieth:
its recipe for DPO has 1e-5.
"""

from lorad.protocol.preflight import Rate
from lorad.spec.model import Spec

_BASE = 10 * 5e-5
_WIDTH = 2000
_EXPONENTS = {"qwen": 0.0775, "llama": 0.781}  # by how the model_type of config.json begins
_NARROWEST = 1024  # hidden size; the formula was not fitted below
_UNKNOWN = 8192  # hidden size that is assumed where config.json names none
_SHARE = 1 / 50
_TINY, _TINY_PREFERENCES = 1e-3, 1e-4  # found on builtin:tiny, where 1e-3 ruins what DPO generates
_FAR = 10


def fitting_rate(spec: Spec, model_type: str, hidden_size: int) -> Rate:
    """Choose the rate for a model by what its config.json has; "" and 0 where it has no such key."""
    is_preference = spec.algorithm.kind == "preference"
    if spec.model.path.startswith("builtin:"):
        lr = _TINY_PREFERENCES if is_preference else _TINY
        return Rate(lr, f"{spec.algorithm.name} on {spec.model.path}")
    width = max(hidden_size or _UNKNOWN, _NARROWEST)
    family = next((name for name in _EXPONENTS if model_type.lower().startswith(name)), None)
    exponents = _EXPONENTS.values() if family is None else (_EXPONENTS[family],)
    rate = min(_BASE * (_WIDTH / width) ** exponent for exponent in exponents)
    model = f"{model_type or 'a model'} of hidden size {hidden_size or 'unknown'}"
    as_which = "" if family else ", the lower of what Llama and Qwen have"
    return Rate(
        float(f"{rate * (_SHARE if is_preference else 1):.3g}"), f"{spec.algorithm.name} on {model}{as_which}"
    )


def far_off(lr: float | None, rate: Rate) -> list[str]:
    """Return the warning for a rate that is ten times off the fitting one; 0 is meant to be 0."""
    if not lr or rate.lr / _FAR < lr < rate.lr * _FAR:
        return []
    times, side = (lr / rate.lr, "above") if lr > rate.lr else (rate.lr / lr, "below")
    return [
        f"trainer.lr: {lr:g} is {times:.0f} times {side} {rate.lr:g}, which fits {rate.why}; without "
        "trainer.lr that is taken"
    ]
