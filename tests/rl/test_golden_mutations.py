"""Each mistake that rivals made, put into the code, is seen by a golden case."""

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.conformance import goldens
from tests.conformance.goldens import ADVANTAGES, CASES, GAES, PAIRS, POLICIES, given

MUTATIONS = {
    "std of the population": ("advantage", "group.std(ddof=1)", "group.std(ddof=0)"),
    "loo with the group's size": ("advantage", "group.size / (group.size - 1)", "1.0"),
    "MaxRL without its guard": ("advantage", "if mean > 0 else np.zeros(group.size)", ""),
    "whitened by samples": ("advantage", "(values * counts).sum() / total", "values.mean()"),
    "upper clip ignored": (
        "loss",
        "1 - loss.clip_low, 1 + loss.clip_high)",
        "1 - loss.clip_low, 1 + loss.clip_low)",
    ),
    "weights with a gradient": ("loss", "_bounded(ratio.detach(), a, loss)", "_bounded(ratio, a, loss)"),
    "GSPO by the sum": ("loss", "(sums / counts)[owner]", "sums[owner]"),
    "GMPO unclipped": (
        "loss",
        'if loss.ratio == "geometric":\n        log_ratio =',
        "if False:\n        log_ratio =",
    ),
    "dual clip for all": (
        "loss",
        "torch.where(a < 0, torch.minimum(clipped, most), clipped)",
        "torch.minimum(clipped, most)",
    ),
    "taus swapped": (
        "loss",
        "torch.where(a > 0, loss.taus[0], loss.taus[1])",
        "torch.where(a > 0, loss.taus[1], loss.taus[0])",
    ),
    "TV of one side": (
        "loss",
        "torch.where(a > 0, moved > loss.clip_high, moved < -loss.clip_low)",
        "moved > loss.clip_high",
    ),
    "TOPR bounds for all": (
        "loss",
        "torch.where(advantages > 0, 1.0, ratio",
        "torch.where(advantages > 9, 1.0, ratio",
    ),
    "k3 the other way round": ("loss", "torch.exp(-near) + near - 1", "torch.exp(near) - near - 1"),
    "k3+ with k3's gradient": ("loss", "square + (k3 - square).detach()", "k3"),
    "KL weighed without gradient": ("loss", "kl * (logprobs - old).exp()", "kl * (current - old).exp()"),
    "masked tokens in the mean": ("levels", "float(mask.sum())", "float(mask.size)"),
    "mask of the sum of ratios": ("correction", "sums / lengths if", "sums if"),
    "IPO of sums": ("pairs", '("ipo", "sigmoid_norm", "simpo")', '("sigmoid_norm", "simpo")'),
    "SimPO with a reference": ("pairs", '_sums(logprobs, mask, owner) if kind == "simpo"', "moved if False"),
    "smoothing of one side": ("pairs", "e * _s(u) - (1 - e) * _s(-u)", "-(1 - e) * _s(-u)"),
    "pairs summed": ("pairs", "slopes[owner] / losses.size", "slopes[owner]"),
    "KTO without z": ("pairs", "sign * (moved - divergence)", "sign * moved"),
    "APO of the chosen alone": ("pairs", "beta * down * (1 - down)", "0 * down"),
    "IPO without its half": ("pairs", "1 / (2 * beta)", "1 / beta"),
    "GAE without lambda": ("gae", "gamma * lam * after", "gamma * after"),
    "GAE without the next value": ("gae", "gamma * following - values", "0 * following - values"),
    "masked values bootstrap": ("gae", "if mask[token]:", "if True:"),
    "returns without values": ("gae", "advantages, advantages + values", "advantages, advantages"),
    "value loss without its half": ("value_loss", "return 0.5 * weights", "return weights"),
    "value clip by the minimum": ("value_loss", "torch.maximum(free, bound)", "torch.minimum(free, bound)"),
    "value clip around the return": ("value_loss", "(old + (values", "(returns + (values"),
    "truncation as a mask": ("correction", "weights.clip(low, high)", "weights * (weights <= high)"),
}


def mutated(name: str, before: str, after: str) -> ModuleType:
    """A copy of a module of lorad/rl with one piece of its text replaced."""
    real = importlib.import_module(f"lorad.rl.{name}")
    text = Path(str(real.__file__)).read_text()
    assert text.count(before) == 1, f"{before!r} is in lorad/rl/{name}.py {text.count(before)} times"
    module = ModuleType(f"mutated_{name}")
    exec(compile(text.replace(before, after), str(real.__file__), "exec"), module.__dict__)
    return module


def is_off(found: object, wanted: object, least: float = 1e-5) -> bool:
    return not np.allclose(np.array(found), np.array(wanted), rtol=least, atol=least)


@pytest.mark.parametrize("mistake", MUTATIONS)
def test_mistake_is_seen_by_a_golden(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mutated(*MUTATIONS[mistake])
    for name in vars(module).keys() & vars(goldens).keys():
        of_rl = str(getattr(getattr(goldens, name), "__module__", "")).startswith("lorad.rl")
        if of_rl and callable(getattr(module, name)) and getattr(module, name).__module__ == module.__name__:
            monkeypatch.setattr(goldens, name, getattr(module, name))
    seen = [name for name in ADVANTAGES if is_off(goldens.advantages_of(name), CASES[name]["advantages"])]
    for name in POLICIES:
        loss, gradient = goldens.loss_and_gradient(*goldens.policy_targets(name), given("logprob"))
        if is_off(loss, CASES[name]["loss"]) or is_off(gradient, CASES[name]["grad"]):
            seen.append(name)
    for name in PAIRS:
        found, case = goldens.judged(name, given("logprob")), CASES[name]
        if is_off([found.loss, *found.gradient], [case["loss"], *case["grad"]], 1e-8):
            seen.append(name)
    seen += [name for name in GAES if is_off(goldens.gae_of(name), CASES[name]["advantages"])]
    loss, gradient = goldens.value_loss_and_gradient()
    if is_off(loss, CASES["value"]["loss"]) or is_off(gradient, CASES["value"]["grad"]):
        seen.append("value")
    assert seen
