"""Whether a base can be rounded to the grid of `model.quantize`, looked at before anything starts."""

from lorad.adapters.targets import HEAD
from lorad.backends.registry import RANKED, SERVERS
from lorad.errors import SpecError
from lorad.models.facts import ModelFacts, refuse_unfilled
from lorad.models.families import FUSED
from lorad.spec.model import Spec


def check_quantize(spec: Spec) -> None:
    """Raise SpecError where trainer or engine would not compute with the rounded numbers: servers and
    megatron read the checkpoint themselves.
    """
    form = spec.model.quantize
    engine, trainer = spec.rollout.backend, spec.trainer.backend
    if form is None:
        return
    if engine in SERVERS:
        raise SpecError(
            f"{form}, but {engine} reads the checkpoint itself and would sample from other weights than the "
            "trainer trains on",
            key="model.quantize",
            hint="Use rollout.backend: builtin, or leave it out.",
        )
    if trainer in RANKED and trainer != "fsdp":
        raise SpecError(
            f"{form}, but {trainer} reads the checkpoint itself and would train on other weights than the "
            "engine samples from",
            key="model.quantize",
            hint="Use trainer.backend: builtin or fsdp, or leave it out.",
        )


def check_blocks(spec: Spec, facts: ModelFacts) -> None:
    """Raise SpecError for a linear that the blocks of the format do not fill, and for experts in tensors of
    all experts, which are not rounded.
    """
    if spec.model.quantize and facts.model_type in FUSED:
        raise SpecError(
            f"{spec.model.quantize}, but the experts of {facts.model_type} lie in tensors of all experts, "
            "which lorad does not round",
            key="model.quantize",
            hint="Leave it out.",
        )
    if spec.model.quantize == "nf4":
        everything = {**facts.linears, **facts.experts}
        refuse_unfilled({name: shape for name, shape in everything.items() if name != HEAD})
