"""Whether a base can be rounded to the grid of `model.quantize`, looked at before anything starts."""

from lorad.adapters.targets import HEAD
from lorad.errors import SpecError
from lorad.models.facts import ModelFacts, refuse_unfilled
from lorad.models.families import FUSED
from lorad.spec.model import Spec


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
