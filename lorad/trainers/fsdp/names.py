"""Lists a checkpoint's linears that the ranks of fsdp have, by its names.

`python -m lorad.trainers.fsdp.names DIRECTORY` writes a line of JSON on stdout: the names, or the error that
the ranks would end with.
"""

import sys
from pathlib import Path

import msgspec
import torch

from lorad.adapters.targets import renamed
from lorad.errors import SpecError, to_wire
from lorad.models.facts import read_facts
from lorad.models.hf.opening import read_config
from lorad.trainers.fsdp import architecture, experts
from lorad.trainers.sharded.lacking import refuse_lacking


def _names(directory: Path) -> list[str]:
    """Return the checkpoint's names for the linears of transformers' model, without reading weights.

    Raises SpecError, also for tensors of the model that the directory lacks.
    """
    config = read_config(directory)
    kinds = architecture.attentions(torch.float32, torch.device("cpu"))
    model = architecture.empty_model(config, torch.float32, kinds)
    refuse_lacking(model, directory)
    layers = architecture.decoder_layers(model)
    linears = architecture.linear_shapes(model, layers)
    names = renamed(linears, read_facts(directory).linears)
    return sorted({*names.values(), *experts.expert_shapes(experts.experts_in(layers, model))})


def main() -> None:
    try:
        answer = msgspec.json.encode({"names": _names(Path(sys.argv[1]))})
    except SpecError as error:
        answer = msgspec.json.encode({"error": to_wire(error)})
    sys.stdout.write(f"\n{answer.decode()}\n")


if __name__ == "__main__":
    main()
