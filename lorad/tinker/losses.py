"""Translates Tinker's losses into what a trainer of lorad takes.

With p the log-probability of a target, q the sampler's log-probability (`logprobs`), A the advantage and
r = exp(p - q), each is a plain sum over all tokens of all datums, as the official documentation has it:

    cross_entropy         -sum w p, with w = `weights`
    importance_sampling   -sum r A
    ppo                   -sum min(r A, clip(r, low, high) A)
    cispo                 -sum sg(clip(r, low, high)) A p
    dro                   -sum (A p - beta / 2 (p - q)^2)
    gspo                  as ppo, where r is exp(mean of p - q over the tokens of `sequence_ratio_mask`), with
                          the gradient of the token's own p
"""

from collections.abc import Mapping

import numpy as np

from lorad.protocol.batch import PolicyLoss, PolicyTargets

_OF_POLICY = ("logprobs", "advantages")
NEEDS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": _OF_POLICY,
    "ppo": _OF_POLICY,
    "cispo": _OF_POLICY,
    "dro": _OF_POLICY,
    "gspo": (*_OF_POLICY, "sequence_ratio_mask"),
}
"""The inputs of each loss beside `target_tokens`; weights may be left out."""
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SETTINGS: dict[str, dict[str, float]] = {"ppo": _CLIP, "cispo": _CLIP, "gspo": _CLIP, "dro": {"beta": 0.05}}
"""The settings of each loss that has any, and their defaults."""

_Inputs = Mapping[str, np.ndarray]
_Settings = Mapping[str, float]


def check(name: str, settings: _Settings, inputs: _Inputs, tokens: int) -> dict[str, np.ndarray]:
    """Return each input that the loss needs, as float32 [tokens].

    Args:
        inputs: The inputs of one datum, or of several datums joined, `target_tokens` among them.

    Raises ValueError for an input or setting that is missing, has another length, or would change nothing.
    """
    if name not in NEEDS:
        raise ValueError(f"loss_fn {name} is not supported; there are {', '.join(NEEDS)}")
    if unknown := sorted(set(settings) - set(_SETTINGS.get(name, {}))):
        raise ValueError(f"loss_fn_config of {name} has no {', '.join(unknown)}")
    if useless := sorted(set(inputs) - {"target_tokens", *NEEDS[name]}):
        raise ValueError(f"loss_fn_inputs of {name}: {', '.join(useless)} would change nothing; leave it out")
    checked = {}
    for key in NEEDS[name]:
        numbers = inputs.get(key, np.ones(tokens, np.float32) if key == "weights" else None)
        if numbers is None or numbers.shape != (tokens,):
            raise ValueError(
                f"loss_fn_inputs of {name}: {key} must have a number for each of {tokens} tokens"
            )
        checked[key] = numbers.astype(np.float32)
        if not np.isfinite(checked[key]).all():
            raise ValueError(f"loss_fn_inputs of {name}: {key} has a number that is not finite")
    complete = {**_SETTINGS.get(name, {}), **settings}
    if not np.isfinite(list(complete.values())).all() or min(complete.values(), default=0.0) < 0:
        raise ValueError("loss_fn_config: a setting is negative or not finite")
    if complete.get("clip_low_threshold", 0.0) > complete.get("clip_high_threshold", 0.0):
        raise ValueError("loss_fn_config: clip_low_threshold is above clip_high_threshold")
    if name == "gspo":
        mask = checked["sequence_ratio_mask"]
        if not np.isin(mask, (0, 1)).all():
            raise ValueError("sequence_ratio_mask: each number must be 0 or 1")
        if checked["advantages"][mask == 0].any():
            raise ValueError("sequence_ratio_mask: a token that it leaves out must have the advantage 0")
    return checked


def policy_of(name: str, settings: _Settings, checked: _Inputs) -> tuple[PolicyLoss, PolicyTargets]:
    """Return the loss, with the normaliser 1, and its targets. `check` has returned the inputs."""
    if name == "cross_entropy":
        return PolicyLoss("linear", returns_logprobs=True), PolicyTargets(checked["weights"])
    complete = {**_SETTINGS.get(name, {}), **settings}
    low = complete.get("clip_low_threshold", -np.inf)
    high = complete.get("clip_high_threshold", np.inf)
    loss = PolicyLoss(
        {"cispo": "weighted", "dro": "dro"}.get(name, "clip"),  # type: ignore[arg-type]
        ratio="sequence" if name == "gspo" else "token",
        anchor="sampler",
        clip_low=1 - low,
        clip_high=high - 1,
        bounds=(low, high),
        beta=complete.get("beta", 0.0),
        returns_logprobs=True,
    )
    mask = checked.get("sequence_ratio_mask")
    return loss, PolicyTargets(checked["advantages"], checked["logprobs"], weights=mask)


def value(name: str, settings: _Settings, p: np.ndarray, checked: _Inputs, lengths: np.ndarray) -> float:
    """Return the loss of a pass without gradients.

    Args:
        p: The log-probability of each target, [N].
        checked: The inputs, as `check` has returned them.
        lengths: How many tokens each datum has, int [datums]; they sum to N.
    """
    if name == "cross_entropy":
        return float(-(p * checked["weights"]).sum(dtype=np.float64))
    complete = {**_SETTINGS.get(name, {}), **settings}
    a = checked["advantages"]
    difference = p.astype(np.float64) - checked["logprobs"]
    ratio = np.exp(difference)
    if name == "importance_sampling":
        return float(-(ratio * a).sum())
    if name == "dro":
        return float(-(p * a - complete["beta"] / 2 * difference**2).sum())
    if name == "gspo":
        mask = checked["sequence_ratio_mask"]
        owner = np.repeat(np.arange(lengths.size), lengths)  # the datum of each token
        counts = np.bincount(owner, mask, minlength=lengths.size).clip(min=1)
        ratio = np.exp(np.bincount(owner, difference * mask, minlength=lengths.size) / counts)[owner]
    clipped = ratio.clip(complete["clip_low_threshold"], complete["clip_high_threshold"])
    return float(-(clipped * p * a if name == "cispo" else np.minimum(ratio * a, clipped * a)).sum())
