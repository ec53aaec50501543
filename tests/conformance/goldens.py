"""The golden cases as lorad expresses them: the settings of a loss, and what the driver gives it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lorad.protocol.batch import PolicyLoss, PolicyTargets, ValueLoss, ValueTargets
from lorad.rl.advantage import advantages
from lorad.rl.correction import correction
from lorad.rl.gae import gae
from lorad.rl.levels import level_weights, normaliser
from lorad.rl.loss import sequence_ratios, token_losses, token_targets
from lorad.rl.pairs import PreferenceOutcome, label_loss, pair_loss
from lorad.rl.value_loss import value_losses
from lorad.spec.algorithm import Preference

_FILE = json.loads((Path(__file__).parents[1] / "data" / "losses" / "goldens.json").read_text())
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in _FILE["cases"]}
LENGTHS = np.array(_FILE["inputs"]["lengths"])
_GROUPS = np.array([2, 2])
_DAPO = PolicyLoss(clip_high=0.28)
_FREE = PolicyLoss(anchor="sampler", clip_low=1e9, clip_high=1e9)

POLICIES: dict[str, tuple[PolicyLoss, dict[str, Any]]] = {
    "grpo": (PolicyLoss(), {"level": "sequence"}),
    "grpo_kl_k3": (PolicyLoss(kl_coef=0.04), {"level": "sequence"}),
    "unbiased_kl": (PolicyLoss(kl_coef=0.04, kl_weighed=True), {"level": "sequence"}),
    "dapo": (_DAPO, {}),
    "dapo_observed": (_DAPO, {"masked": True}),
    "dr_grpo": (PolicyLoss(), {"level": "constant"}),
    "dr_grpo_verl": (PolicyLoss(), {"level": "constant"}),
    "two_sided": (PolicyLoss(clip_high=0.28, dual=3.0), {}),
    "dual_clip": (PolicyLoss(dual=3.0), {}),
    "gspo": (PolicyLoss(ratio="sequence", clip_low=3e-4, clip_high=4e-4), {"level": "sequence"}),
    "gspo_wide": (PolicyLoss(ratio="sequence"), {"level": "sequence"}),
    "gspo_verl": (PolicyLoss(ratio="sequence"), {"level": "sequence"}),
    "luspo": (PolicyLoss(ratio="sequence"), {"level": "sum", "normaliser": 4.0}),
    "gmpo": (PolicyLoss(ratio="geometric", clip_low=0.4, clip_high=0.4), {"level": "sequence"}),
    "cispo": (PolicyLoss("weighted"), {}),
    "cispo_trl_default": (PolicyLoss("weighted", bounds=(0.0, 0.2)), {}),
    "cispo_verl": (PolicyLoss("weighted", bounds=(0.8, 1.2)), {}),
    "rollout_is": (PolicyLoss("weighted", anchor="sampler", bounds=(0.8, 1.28), drops=True), {}),
    "importance_sampling": (_FREE, {"level": "sum"}),
    "topr": (PolicyLoss("weighted", negative_bounds=(0.0, 1.0)), {}),
    "sapo": (PolicyLoss("soft"), {"level": "sequence"}),
    "sapo_verl": (PolicyLoss("soft"), {"level": "sequence"}),
    "dppo_tv": (PolicyLoss("divergence", anchor="sampler", clip_low=0.15, clip_high=0.15), {}),
    "prime_default": (
        PolicyLoss("divergence", anchor="sampler", kl_coef=2e-3, kl_type="k2"),
        {"reference": "sampler"},
    ),
    "distill": (
        PolicyLoss("divergence", anchor="sampler", clip_high=1.0, kl_coef=2e-3, kl_type="k2"),
        {"reference": "sampler", "advantages": "teacher"},
    ),
    "dro": (PolicyLoss("dro"), {}),
    "sft": (PolicyLoss("linear"), {"advantages": "ones"}),
    "sft_observed": (PolicyLoss("linear"), {"advantages": "ones", "masked": True}),
    "dft": (PolicyLoss("rectified"), {}),
    "dapo_token_truncate": (_DAPO, {"correction": [("token_truncate", 0.0, 2.0)]}),
    "dapo_token_mask": (_DAPO, {"correction": [("token_mask", 0.6, 2.0)]}),
    "icepop": (_DAPO, {"correction": [("token_mask", 0.6, 2.0)]}),
    "dapo_sequence_truncate": (_DAPO, {"correction": [("sequence_truncate", 0.0, 2.0)]}),
    "dapo_sequence_mask": (_DAPO, {"correction": [("sequence_mask", 0.0, 2.0)]}),
    "geometric_mask_tis": (
        _DAPO,
        {"correction": [("geometric_mask", 0.8, 1.2), ("token_truncate", 0.0, 2.0)]},
    ),
    "opsm": (PolicyLoss(), {"advantages": "opsm"}),
    "vespo": (PolicyLoss("linear"), {"advantages": "vespo"}),
    **{
        f"kl_{kind}": (
            PolicyLoss("linear", kl_coef=1.0, kl_type=kind),
            {"level": "sum", "advantages": "zeros"},
        )
        for kind in ("k1", "abs", "k2", "k3", "k3+")
    },
}
ADVANTAGES: dict[str, dict[str, Any]] = {
    "grpo_std": {"epsilon": 1e-6},
    "grpo_mean": {"scale": "one"},
    "rloo": {"baseline": "loo", "scale": "one"},
    "maxrl": {"scale": "mean", "epsilon": 1e-6},
    "maxrl_negative": {"scale": "mean", "epsilon": 1e-6},
    "opo": {"baseline": "length", "scale": "one"},
    "reinforce++": {"baseline": "zero", "scale": "whiten"},
    "reinforce++_baseline": {"scale": "whiten"},
}
GAES = ("gae", "gae_returns", "gae_observed", "gae_discounted")


PAIRS: dict[str, Preference] = {
    "dpo": Preference(),
    "dpo_smoothed": Preference(smoothing=0.1),
    "trl_sigmoid": Preference(),
    "trl_ipo": Preference("ipo"),
    "trl_hinge": Preference("hinge"),
    "trl_apo_zero": Preference("apo_zero"),
    "trl_sigmoid_norm": Preference("sigmoid_norm"),
    "simpo": Preference("simpo"),
    "kto": Preference("kto"),
}


def judged(name: str, at: np.ndarray) -> PreferenceOutcome:
    """A case of preferences: pairs (0, 1) and (2, 3), or 0 and 2 desired. at: [T], the log-probabilities."""
    wanted = PAIRS[name]
    if wanted.loss != "kto":
        return pair_loss(at, given("reference"), LENGTHS, wanted)
    desired = np.array([True, False, True, False])
    return label_loss(at, given("reference"), LENGTHS, desired, wanted, CASES[name]["config"]["kl"])


def given(name: str) -> np.ndarray:
    """float64 [T]: an input of the file."""
    return np.array(_FILE["inputs"][name], np.float64)


def per_token(kind: str | None) -> Any:
    """float64 [T]: the advantages that a driver would send."""
    logprob, old, sampler = given("logprob"), given("old"), given("sampler")
    each: np.ndarray = np.repeat(given("advantages"), LENGTHS)
    owner = np.repeat(np.arange(LENGTHS.size), LENGTHS)
    if kind == "teacher":  # prime-rl leaves out tokens whose probability fell, whatever their advantage
        return (given("reference") - logprob) * (np.exp(logprob) - np.exp(sampler) >= -0.2)
    if kind == "opsm":
        stale = (np.bincount(owner, sampler - logprob) / LENGTHS)[owner]
        return each * ((each >= 0) | (stale <= 0.05))
    if kind == "vespo":
        weight = np.exp(np.bincount(owner, logprob - old))[owner]
        k, lam = np.where(each >= 0, 2.0, 3.0), np.where(each >= 0, 3.0, 2.0)
        return np.exp(lam + k * np.log(weight) - lam * weight) * each
    return {"ones": np.ones_like(each), "zeros": np.zeros_like(each)}.get(kind or "", each)


def policy_targets(name: str) -> tuple[PolicyLoss, PolicyTargets, float]:
    """The loss of a case, its targets in float64, and its normaliser."""
    loss, about = POLICIES[name]
    level, trained = about.get("level", "token"), given("observed") > 0 if about.get("masked") else None
    each = per_token(about.get("advantages"))
    for kind, low, high in about.get("correction", ()):
        each = each * correction(given("old"), given("sampler"), LENGTHS, kind, low, high)
    targets = PolicyTargets(
        advantages=each,
        sampler_logprobs=given("sampler"),
        old_logprobs=given("old"),
        reference_logprobs=given(about.get("reference", "reference")) if loss.kl_coef else None,
        weights=level_weights(LENGTHS, level, _GROUPS, trained),
    )
    return loss, targets, about.get("normaliser") or normaliser(LENGTHS, level, _GROUPS, trained, length=4)


def loss_and_gradient(
    loss: PolicyLoss, targets: PolicyTargets, total: float, at: np.ndarray
) -> tuple[float, np.ndarray]:
    """(loss, dloss/dlogprob [T]) as `lorad/rl/loss.py` has them. at: [T], the log-probabilities."""
    logprobs = torch.tensor(at, dtype=torch.float32, requires_grad=True)
    those = token_targets(targets, slice(None), logprobs.device)
    those = sequence_ratios(logprobs.detach(), those, loss, torch.from_numpy(LENGTHS))
    value = token_losses(logprobs, those, loss).loss.sum() / total
    torch.autograd.backward(value)
    assert logprobs.grad is not None
    return value.item(), logprobs.grad.numpy()


def advantages_of(name: str) -> np.ndarray:
    config = CASES[name]["config"]
    rewards = np.array(config.get("rewards", _FILE["inputs"]["rewards"]))
    sizes = np.array(config.get("group_sizes", _FILE["inputs"]["group_sizes"]))
    lengths = np.array(config["lengths"]) if "lengths" in config else None
    return advantages(rewards, sizes, lengths=lengths, **ADVANTAGES[name])


def gae_of(name: str) -> np.ndarray:
    """float64 [T]: the advantages, or the returns, of one of GAES."""
    config = CASES[name]["config"]
    rewards = np.zeros(LENGTHS.sum())
    rewards[np.cumsum(LENGTHS) - 1] = given("terminal_rewards")
    trained = given("observed") > 0 if config.get("mask") else None
    found = gae(rewards, given("old_values"), LENGTHS, config["gamma"], config["lam"], trained)
    return found[name.endswith("returns")]


def value_loss_and_gradient() -> tuple[float, np.ndarray]:
    """(loss, dloss/dvalue [T]), the mean over tokens."""
    values = torch.tensor(given("values"), dtype=torch.float32, requires_grad=True)
    targets = ValueTargets(given("gae_returns"), given("old_values"))
    losses, _ = value_losses(values, targets, slice(None), ValueLoss(CASES["value"]["config"]["clip"]))
    value = losses.mean()
    torch.autograd.backward(value)
    assert values.grad is not None
    return value.item(), values.grad.numpy()
