"""Adapters on models of transformers as PEFT computes them, whatever names a file gives to the linears."""

import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from lorad.adapters.adapter import AdapterConfig
from lorad.adapters.targets import renamed
from lorad.models.facts import is_left_out


def put_on_peft(
    reference: Any, config: AdapterConfig, numbers: Mapping[str, np.ndarray]
) -> tuple[Any, dict[str, str]]:
    """Return PEFT's model with an adapter of these numbers, and its names of the tensors."""
    linears = [
        name
        for name, module in reference.named_modules()
        if hasattr(module, "in_features") and not is_left_out(name, 0)
    ]
    paths = renamed(config.modules, linears)
    pattern = rf"model\.(?:{'|'.join(map(re.escape, paths.values()))})"
    settings = LoraConfig(r=config.rank, lora_alpha=int(config.alpha), target_modules=pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(_Nameless(reference), settings).eval()
    names = {}
    for name, array in numbers.items():
        module, _, half = name.rpartition(".lora_")
        names[name] = f"base_model.model.model.{paths[module]}.lora_{half[0]}.default.weight"
        model.get_parameter(names[name]).data = torch.from_numpy(array)
    return model, names


class _Nameless(torch.nn.Module):
    """A model without a config, by which PEFT would take other targets than are named."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def logprobs(model: Any, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Return the log-probability of each token after a prompt, [tokens]."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    values: np.ndarray = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
    return values
