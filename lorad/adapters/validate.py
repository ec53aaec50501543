"""Whether an adapter fits a base: checked before any engine sees it, because engines do not check.

SGLang dies of a wrong width at the first request; vLLM serves it; one NaN adapter poisons its neighbours'
answers.
"""

from collections.abc import Mapping

import numpy as np

from lorad.adapters.adapter import MAGNITUDE, Adapter, AdapterConfig, Outline
from lorad.adapters.forms import advice_for
from lorad.adapters.targets import HEAD, experts_of, layer_of, leaf
from lorad.errors import AdapterRefused

_OTHER_BASE = "was it made for another base?"


def validate(adapter: Adapter, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raise AdapterRefused, naming the tensor, unless `adapter` is whole, finite, fp32 and fits `shapes`.

    `shapes` has (out, in) of every linear of the base by logical name. Nothing is changed.
    """
    expected = refuse_unfit(
        Outline(adapter.config, {name: t.shape for name, t in adapter.tensors.items()}), shapes
    )
    for name in expected:
        if (dtype := adapter.tensors[name].dtype) != np.float32:
            _refuse(f"{name} is {dtype}, not float32", "export it in fp32")
    if not adapter.is_finite():
        name = next(name for name in expected if not np.isfinite(adapter.tensors[name]).all())
        tensor = adapter.tensors[name]
        bad = f"{np.count_nonzero(~np.isfinite(tensor))} of {tensor.size} values that are NaN or infinite"
        _refuse(f"{name} holds {bad}", "lower the learning rate, or start from an earlier version")


def refuse_unfit(outlined: Outline, shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """Return every tensor's shape, by no weights. Raises AdapterRefused, naming a tensor that is unfit."""
    expected = expected_shapes(outlined.config, shapes)
    if not expected:
        _refuse("it adapts no module", "name some in lora.target_modules")
    if missing := sorted(set(expected) - set(outlined.shapes)):
        _refuse(f"{missing[0]} is missing ({len(missing)} of {len(expected)} tensors)", "export it again")
    if extra := sorted(set(outlined.shapes) - set(expected)):
        _refuse(f"{extra[0]} belongs to none of its modules ({len(extra)} such tensors)", "export it again")
    for name, shape in expected.items():
        if (own := outlined.shapes[name]) != shape:
            _refuse(f"{name} has shape {list(own)}, the base needs {list(shape)}", _OTHER_BASE)
    named = outlined.named
    if named.targets is None or named.excluded is None or outlined.fused:
        return expected
    # A linear that the configuration names, in a layer with others, has tensors. Experts, which transformers
    # 5 has as parameters, are looked at where some have a pair of their own.
    modules = set(outlined.config.modules)
    has_experts = bool(outlined.config.experts)
    layers = {None, *map(layer_of, modules)}
    for module in shapes:
        counts = layer_of(module) in layers and (has_experts or not experts_of(module))
        if counts and module not in modules and named.may_have(module):
            _refuse(f"{module} is in its target_modules and has no tensor", "export the adapter again")
    return expected


def expected_shapes(
    config: AdapterConfig, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that an adapter of `config` has.

    Raises AdapterRefused for an unknown module, and for DoRA on experts.
    """
    expected: dict[str, tuple[int, ...]] = {}
    if config.dora and config.experts:
        _refuse(f"DoRA is not computed on experts ({config.experts[0]})", "adapt them without DoRA")
    for module in config.modules:
        if module not in shapes and leaf(module) == HEAD:
            _refuse(
                f"{module} of the base is its embedding and no linear",
                "train without lm_head in target_modules",
            )
        if module not in shapes:
            _refuse(f"the base has no linear {module}", advice_for(module, shapes))
        out, width = shapes[module]
        expected[f"{module}.lora_A.weight"] = (config.rank_of(module), width)
        expected[f"{module}.lora_B.weight"] = (out, config.rank_of(module))
        if config.dora:
            expected[f"{module}.{MAGNITUDE}"] = (out,)
    return expected


def _refuse(what: str, hint: str) -> None:
    raise AdapterRefused(f"the adapter does not fit: {what}", hint=hint)
