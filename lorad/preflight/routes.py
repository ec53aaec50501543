"""Check before anything starts that the routes of a mixture can be recorded and replayed."""

from typing import NamedTuple

from lorad.errors import SpecError
from lorad.limits.arguments import REPLAYS
from lorad.models.facts import ModelFacts
from lorad.servers.table import SERVERS
from lorad.spec.model import Spec


class _Lack(NamedTuple):
    why: str
    hint: str


def check_routes(spec: Spec, facts: ModelFacts) -> list[str]:
    """Return warnings. Raises SpecError where `rollout.routes: record` asks for what cannot be."""
    lack = _lack(spec, facts)
    if spec.rollout.routes == "record" and lack is not None:
        raise SpecError(lack.why, key="rollout.routes", hint=f"{lack.hint} Or leave it out.")
    if lack is None or not is_due(spec, facts):
        return []
    return [
        f"rollout.routes: {lack.why}, so experts may differ between rollout and training, which bfloat16 "
        f"makes likely. {lack.hint}"
    ]


def records_routes(spec: Spec, facts: ModelFacts) -> bool:
    """Return whether the engine records routes, by `rollout.routes` and what it can."""
    return is_due(spec, facts) and _lack(spec, facts) is None


def is_due(spec: Spec, facts: ModelFacts) -> bool:
    """Return whether routes are asked for, or the base is a mixture whose routes rounding changes."""
    dtype = facts.dtype if spec.model.dtype == "auto" else spec.model.dtype
    is_auto = spec.rollout.routes == "auto" and spec.algorithm.kind == "rl"
    return spec.rollout.routes == "record" or (is_auto and bool(facts.experts) and dtype == "bfloat16")


def _lack(spec: Spec, facts: ModelFacts) -> _Lack | None:
    trainer = spec.trainer.backend
    engine = spec.rollout.backend
    if not facts.experts:
        return _Lack("the model is no mixture of experts, there is nothing to record", "Name another model.")
    if spec.algorithm.kind != "rl":
        return _Lack(f"{spec.algorithm.name} trains on no samples of the engine", "Set it to off.")
    why = ""
    if engine in SERVERS and not SERVERS[engine].records_routes:
        why = f"lorad records no routes of {engine}, which does so on GPUs alone and was never seen to"
    elif engine in SERVERS and spec.rollout.urls:
        why = "lorad records no routes of servers that you run"
    elif engine in SERVERS and (facts.routes is None or facts.routes.layers != facts.layers):
        why = f"lorad records routes of {engine} where every layer has experts"
    if why:
        return _Lack(why, "Use rollout.backend: builtin.")
    if trainer in REPLAYS and facts.model_type not in REPLAYS[trainer]:
        supported = ", ".join(REPLAYS[trainer])
        return _Lack(
            f"{trainer} replays no routes of {facts.model_type}, only of {supported}", "Set it to off."
        )
    return None
