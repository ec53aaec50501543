"""Keys of a spec that nothing reads with its algorithm."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from lorad.errors import SpecError
from lorad.rl.tasks import TASKS
from lorad.spec.algorithm import Algorithm, Kind, Kl
from lorad.spec.data import Data, single
from lorad.spec.model import Rollout, Spec

_SAMPLED = ("temperature", "top_p", "top_k", "max_staleness")  # evals are greedy, and of the current version
_SUPERVISED = (
    *("format", "completion_key", "messages_key", "max_sample_tokens"),
    *("chosen_key", "rejected_key", "label_key"),
)
_READ: dict[Kind, tuple[str, ...]] = {
    "sft": ("name", "skip_empty_updates"),
    "preference": ("name", "skip_empty_updates", "preference", "kl"),
    "tinker": ("name",),
}
_SMOOTH = ("sigmoid", "sigmoid_norm", "simpo")


def idle_keys(spec: Spec) -> Iterator[SpecError]:
    """Yield an error for each key that has another value than its default, and no effect."""
    algorithm = spec.algorithm
    kind = spec.algorithm.kind
    data = Data()
    rollout = Rollout()
    usual = Algorithm(name=algorithm.name)
    if kind == "rl":
        idle = _changed("data", spec.data, data, _SUPERVISED)
        idle += _changed("algorithm", algorithm, usual, ("preference",))
        why = f"{algorithm.name} samples its completions"
    else:
        keys = [key for key in algorithm.__struct_fields__ if key not in _READ[kind]]
        idle = _changed("algorithm", algorithm, usual, keys) + _changed(
            "rollout", spec.rollout, rollout, _SAMPLED
        )
        why = f"{algorithm.name} trains on the completions of the data, and its evaluations are greedy"
    if kind == "tinker":
        keys = [key for key in data.__struct_fields__ if key != "max_sample_tokens"]
        idle += _changed("data", spec.data, data, keys) + ["eval.sets"] * bool(spec.eval.sets)
        why = "data, losses and the optimizer's settings come from Tinker's client"
    if kind == "preference":
        preference = algorithm.preference
        kl = algorithm.kl
        reads = {
            "preference.gamma": preference.gamma is None or preference.loss == "simpo",
            "preference.smoothing": not preference.smoothing or preference.loss in _SMOOTH,
            "preference.nll": not preference.nll or preference.loss != "kto",
            "kl": replace(kl, reference=None) == Kl(),
            "kl.reference": kl.reference is None or algorithm.has_reference,
        }
        idle += [f"algorithm.{key}" for key, is_read in reads.items() if not is_read]
    if kind != "rl" or not algorithm.reads_reward:
        idle += _changed("data", spec.data, data, ("difficulty",))
    elif spec.data.difficulty is not None and single(spec.data.train) in TASKS:
        idle.append("data.difficulty")
        why = "no prompt of a builtin task comes twice"
    for key in dict.fromkeys(idle):
        yield SpecError(f"it has no effect: {why}", key=key, hint="Leave it out.")


def _changed(section: str, settings: Any, usual: Any, keys: tuple[str, ...] | list[str]) -> list[str]:
    return [f"{section}.{key}" for key in keys if getattr(settings, key) != getattr(usual, key)]
