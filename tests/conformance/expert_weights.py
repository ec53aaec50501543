"""The weights of experts in a model of transformers, with adapters merged into them."""

import math

import torch

from lorad.adapters.adapter import Adapter, AdapterConfig

_Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def merge(model: torch.nn.Module, adapter: Adapter) -> _Pairs:
    """Add an adapter to the weights; returns its A and B by module."""
    pairs: _Pairs = {}
    for module in adapter.config.modules:
        a, b = (torch.tensor(adapter.tensors[f"{module}.lora_{half}.weight"]) for half in "AB")
        pairs[module] = a, b
        with torch.no_grad():
            weight_in(model, module).data.add_(adapter.config.scale_of(module) * b @ a)
    return pairs


def gradient_norm(model: torch.nn.Module, pairs: _Pairs, config: AdapterConfig) -> float:
    """The norm of an adapter's gradient, from that of the merged weights: dA = s B^T dW and dB = s dW A^T."""
    squares = 0.0
    for module, (a, b) in pairs.items():
        grad = config.scale_of(module) * weight_in(model, module, of_gradients=True)
        squares += float((b.T @ grad).square().sum() + (grad @ a.T).square().sum())
    return math.sqrt(squares)


def weight_in(model: torch.nn.Module, module: str, *, of_gradients: bool = False) -> torch.Tensor:
    """The weight of a linear, or its gradient; transformers holds those of all experts in two tensors."""
    path, _, expert = module.replace("block_sparse_moe", "mlp").partition(".experts.")
    number, _, linear = expert.partition(".")
    linear = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(linear, linear)
    fused = "down_proj" if linear == "down_proj" else "gate_up_proj"
    tensor = model.get_parameter(f"{path}.experts.{fused}" if expert else f"{module}.weight")
    whole = tensor.grad if of_gradients else tensor
    assert whole is not None
    if not expert:
        return whole
    if "gate_up_proj_bias" in dict(model.get_submodule(f"{path}.experts").named_parameters()):  # gpt-oss
        turned = whole[int(number)].mT
        return {"gate_proj": turned[::2], "up_proj": turned[1::2], "down_proj": turned}[linear]
    gate, up = whole[int(number)].chunk(2)
    return {"gate_proj": gate, "up_proj": up, "down_proj": whole[int(number)]}[linear]
