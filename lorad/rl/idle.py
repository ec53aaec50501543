"""Keys of a spec that nothing reads with its algorithm."""

from collections.abc import Iterator
from typing import Any

from lorad.errors import SpecError
from lorad.spec.algorithm import Algorithm, Kind
from lorad.spec.model import Data, Rollout, Spec

_SAMPLED = ("temperature", "top_p", "top_k", "max_staleness")  # evals are greedy, and of the current version
_SUPERVISED = ("format", "completion_key", "messages_key", "max_sample_tokens")
_READ: dict[Kind, tuple[str, ...]] = {"sft": ("name", "skip_empty_updates")}


def idle_keys(spec: Spec) -> Iterator[SpecError]:
    """Yield an error for each key that has another value than its default, and no effect."""
    algorithm, kind = spec.algorithm, spec.algorithm.kind
    data, rollout, usual = Data(), Rollout(), Algorithm(name=algorithm.name)
    if kind == "rl":
        idle = _changed("data", spec.data, data, _SUPERVISED)
        why = f"{algorithm.name} samples its completions"
    else:
        keys = [key for key in algorithm.__struct_fields__ if key not in _READ[kind]]
        idle = _changed("algorithm", algorithm, usual, keys) + _changed(
            "rollout", spec.rollout, rollout, _SAMPLED
        )
        why = f"{algorithm.name} trains on the completions of the data, and its evaluations are greedy"
    for key in idle:
        yield SpecError(f"it has no effect: {why}", key=key, hint="Leave it out.")


def _changed(section: str, given: Any, usual: Any, keys: tuple[str, ...] | list[str]) -> list[str]:
    return [f"{section}.{key}" for key in keys if getattr(given, key) != getattr(usual, key)]
