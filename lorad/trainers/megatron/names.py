"""Lists a checkpoint's linears that Megatron adapts: `python -m lorad.trainers.megatron.names SETTINGS`.

SETTINGS is a BodySettings as JSON. Writes a line of JSON on stdout: the names, or the error that the ranks
would end with, or would miss.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from lorad.errors import SpecError, to_wire
from lorad.models.facts import is_left_out, stored_tensors
from lorad.trainers.megatron.body import reference_of
from lorad.trainers.megatron.experts import expert_linears
from lorad.trainers.megatron.provider import build, check_rotary, open_bridge, taken
from lorad.trainers.megatron.targets import HEAD, trainable_shapes
from lorad.trainers.sharded.body import BodySettings
from lorad.trainers.sharded.lacking import refuse_lacking
from lorad.trainers.sharded.workers import join

_HINT = "use trainer.backend: fsdp, which loads what transformers loads"


def _names(settings: BodySettings) -> list[str]:
    """Return the names of the linears in transformers' model that Megatron's ranks adapt.

    Raises SpecError for what Megatron-Bridge does not load, or would load without some of its tensors.
    """
    bridge = open_bridge(settings)
    config = bridge.hf_pretrained.config
    registry = bridge._model_bridge.mapping_registry()
    with taken(settings.model):
        reference = reference_of(config)
    refuse_lacking(reference, Path(settings.model))
    is_tied = bool(config.tie_word_embeddings)
    unknown = [
        name
        for name in stored_tensors(Path(settings.model))
        if registry.hf_to_megatron_lookup(name) is None
        and not is_left_out(name, config.num_hidden_layers)
        and not (is_tied and name == f"{HEAD}.weight")
    ]
    if unknown:
        raise SpecError(
            f"Megatron-Bridge would leave out {len(unknown)} tensors of the model: {', '.join(unknown[:3])}",
            key="model.path",
            hint=_HINT,
        )
    if settings.device == "cpu":
        # Bridge has to fill all parameters of Megatron's own layers
        base = build(settings, is_empty=True)
        tasks = base.bridge.get_conversion_tasks(base.model)
        sources = {
            task.param_name: task.mapping.hf_param for task in tasks if task and task.param_weight is not None
        }
        places = {name: place.shape for name, (_, place) in stored_tensors(Path(settings.model)).items()}
        for name, parameter in base.model.named_parameters():
            source = sources.get(name)
            shape = tuple(parameter.shape)
            is_other = isinstance(source, str) and len(shape) == 1 and places.get(source, shape) != shape
            if source is None or is_other:
                raise SpecError(
                    f"Megatron-Bridge finds no tensor in {Path(settings.model)} for {name} {[*shape]} of "
                    "Megatron's layers",
                    key="model.path",
                    hint=_HINT,
                )
        check_rotary(reference_of(base.config), base.model, base.config)
    shapes = trainable_shapes(
        reference,
        expert_linears(Path(settings.model), config),
        lambda paths: [registry.megatron_to_hf_lookup(f"{path}.weight") is not None for path in paths],
        tied=is_tied,
    )
    return [*shapes]


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=BodySettings)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("meta")  # where Megatron makes parameters
    with tempfile.TemporaryDirectory() as directory:
        join(0, 1, Path(directory, "meeting"), torch.device("cpu"))
        try:
            answer = msgspec.json.encode({"names": _names(settings)})
        except SpecError as error:
            answer = msgspec.json.encode({"error": to_wire(error)})
    os.write(1, b"\n" + answer + b"\n")


if __name__ == "__main__":
    main()
