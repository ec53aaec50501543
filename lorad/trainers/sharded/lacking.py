"""Finds the tensors of a transformers model that a checkpoint lacks, without reading its numbers."""

from pathlib import Path
from typing import Any

import torch

from lorad.errors import SpecError
from lorad.models.facts import stored_tensors


def refuse_lacking(model: Any, directory: Path) -> None:
    """Raise SpecError for tensors that no file of the model's directory has, or has in another shape.

    transformers' own loader compares them on the meta device, with all names that it converts.
    """
    places = {name: place for name, (_, place) in stored_tensors(directory).items()}
    headers = {name: torch.empty(place.shape, device="meta") for name, place in places.items()}
    _, info = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=headers,
        device_map="meta",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    if missing := sorted(info["missing_keys"]):
        raise SpecError(
            f"{directory}: no tensor {missing[0]}, and {len(missing)} are missing in all",
            key="model.path",
            hint="complete the download; or the weights and config.json belong to different models",
        )
    if unfit := sorted(info["mismatched_keys"]):
        name, shape, expected = unfit[0]
        raise SpecError(
            f"{directory}: {name} has shape {tuple(shape)}, config.json says {tuple(expected)}",
            key="model.path",
            hint="the weights and config.json belong to different models",
        )
