"""Room for one adapter in a model that is about to be sharded: on linears by PEFT, on experts by `experts`.

PEFT reads the sizes of a linear off its weight, of which a rank has only some rows after sharding. So an
adapter is put on all linears before, and thrown away after; PEFT's wrappers stay and remember the sizes.
"""

import contextlib
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lorad.adapters.adapter import MAGNITUDE, AdapterConfig
from lorad.errors import AdapterRefused
from lorad.models.lora import row_norms
from lorad.trainers.fsdp import experts
from lorad.trainers.sharded.body import Mounted, MountKey

_NAME = "mounted"
_HALVES = ("lora_A", "lora_B")
_PARTS = (*_HALVES, MAGNITUDE)


def is_adapter(parameter: str) -> bool:
    """Return whether a parameter belongs to an adapter, by its name."""
    return any(f".{part}.{_NAME}." in parameter for part in _PARTS)


class AdapterRoom:
    """The adapter in a model, which has one from the beginning, see `parameters`.

    Attributes:
        shapes: The shapes of all linears, also of experts.
        linears: PEFT's wrappers of the linears that are modules.

    Args:
        shapes, names: The shapes and the checkpoint's names of linears that are modules, by their paths.
        mixtures: The modules of experts, whose linears have no module of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: Mapping[str, tuple[int, int]],
        names: Mapping[str, str],
        mixtures: Mapping[str, Any],
    ) -> None:
        self._mixtures = dict(mixtures)
        self._paths = {names[path]: path for path in shapes}
        dense = {name: shapes[path] for name, path in self._paths.items()}
        self.shapes = {**dense, **experts.expert_shapes(mixtures)}
        self._holds = True
        self._adapted: list[Any] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks for what transformers has deprecated
            config = _lora(AdapterConfig(1, 1.0, tuple(shapes)))
            self._peft: Any = get_peft_model(_Nameless(model), config, _NAME, low_cpu_mem_usage=True)
        self.linears: dict[str, Any] = {name: model.get_submodule(path) for name, path in self._paths.items()}

    def parameters(self) -> set[nn.Parameter]:
        """Return the adapter's parameters, which `fully_shard` must ignore; call `clear` once it is done."""
        return {parameter for name, parameter in self._peft.named_parameters() if is_adapter(name)}

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """Leave in `shapes` the linears that are called inside the block: others bypass their adapters."""
        called: set[str] = set()
        hooks = [
            module.register_forward_hook(lambda *_, name=name: called.add(name))
            for name, module in {**self.linears, **self._mixtures}.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._mixtures = {name: module for name, module in self._mixtures.items() if name in called}
        of_experts = experts.expert_shapes(self._mixtures)
        self.shapes = {name: shape for name, shape in self.shapes.items() if name in called | set(of_experts)}

    def clear(self) -> None:
        """Take the adapter out of the model."""
        self._adapted = []
        experts.take_out(self._mixtures)
        if self._holds:
            self._peft.delete_adapter(_NAME)
            self._holds = False

    def put(self, key: MountKey, dtype: torch.dtype, device: torch.device) -> "_ReplicatedAdapter":
        """Replace the present adapter by one of zeros on exactly the modules of `key`.

        Raises AdapterRefused, and holds none, for modules that the model does not have.
        """
        self.clear()
        config = key.adapter
        unknown = sorted(set(config.modules) - set(self.shapes))
        if unknown or not config.modules or min(config.rank, config.rank_of_experts) < 1:
            raise AdapterRefused(
                f"no adapter of rank {config.rank} fits "
                f"{', '.join(unknown[:3]) or f'{len(config.modules)} modules'}",
                hint=f"the {len(self.shapes)} linears of the base have names like {next(iter(self.shapes))}",
            )
        places = []
        if linears := tuple(name for name in config.modules if name in self.linears):
            paths = tuple(self._paths[name] for name in linears)
            self._peft.add_adapter(
                _NAME, _lora(msgspec.structs.replace(config, modules=paths)), low_cpu_mem_usage=True
            )
            self._holds = True
            placed = {name for name, linear in self.linears.items() if _NAME in linear.lora_A}
            if placed != set(linears):
                self.clear()
                wrong = sorted(placed ^ set(linears))
                raise AdapterRefused(
                    f"PEFT would put the adapter on {len(placed)} modules instead of {len(linears)}: "
                    f"{', '.join(wrong[:3])}",
                    hint="use another version of peft",
                )
            for name, half in itertools.product(linears, _HALVES):
                linear = getattr(self.linears[name], half)[_NAME]
                linear.weight = nn.Parameter(torch.zeros(linear.weight.shape, dtype=dtype, device=device))
                places.append(_ParameterParts([f"{name}.{half}.weight"], linear.weight))
            for name in linears if config.dora else ():
                linear = self.linears[name]  # PEFT takes the magnitude, zero in fp32, out with the rest
                holder = nn.Module()
                holder.weight = nn.Parameter(torch.zeros(linear.out_features, device=device))
                linear.lora_magnitude_vector[_NAME] = holder
                linear.lora_variant[_NAME] = _Dora()
                places.append(_ParameterParts([f"{name}.{MAGNITUDE}"], holder.weight))
            self._peft.set_adapter(_NAME)
            self._adapted = [self.linears[name] for name in linears]
        for (path, linear), pair in experts.put(self._mixtures, config, dtype, device).items():
            names = [f"{path}.{expert}.{linear}" for expert in pair.experts]
            for half, weight in zip(_HALVES, (pair.a, pair.b), strict=True):
                places.append(_ParameterParts([f"{name}.{half}.weight" for name in names], weight))
        return _ReplicatedAdapter(places)

    @contextlib.contextmanager
    def acting(self, adapter: bool, train: bool) -> Iterator[None]:
        """Set whether the adapter and its dropout act inside the block."""
        experts.switch(self._mixtures, is_on=adapter, is_training=train)
        for linear in self._adapted:
            linear.lora_dropout[_NAME].train(train)
            if not adapter:
                linear.enable_adapters(False)
        try:
            yield
        finally:
            for linear in self._adapted if not adapter else ():
                linear.enable_adapters(True)

    def row_norms(self, modules: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the length of each row of the base's weights, [out] in fp32. Collective."""
        norms = {}
        for name in modules:
            weight = self.linears[name].get_base_layer().weight
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            norms[name] = row_norms(whole).cpu().numpy()
        return norms


class _Dora:
    """PEFT's `DoraLinearVariant` with norm and magnitude in fp32, whatever the dtype of the base.

    Inside the forward of a layer its weights are whole.
    """

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        a = module.lora_A[active_adapter].weight
        b = module.lora_B[active_adapter].weight
        base = module.get_base_layer()
        scale = module.scaling[active_adapter]
        c = module.lora_magnitude_vector[active_adapter].weight / row_norms(base.weight, scale * b, a)
        bias = 0 if base.bias is None else base.bias
        delta: Tensor = (
            result - bias + scale * module.lora_B[active_adapter](module.lora_A[active_adapter](x))
        )
        long: Tensor = c * delta
        return long.to(result.dtype) + bias


class _ParameterParts(NamedTuple):
    """A parameter, and the names of an adapter's tensors that it holds: one, or a stack of several."""

    names: list[str]
    weight: nn.Parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of each tensor."""
        return tuple(self.weight.shape[-2:])


class _ReplicatedAdapter(Mounted):
    """An adapter that is whole on every rank: all linears' A and B, DoRA's magnitudes, experts' A and B."""

    def __init__(self, places: Sequence[_ParameterParts]) -> None:
        self._places = list(places)
        self.parameters = [place.weight for place in self._places]
        self.are_b = [".lora_B." in place.names[0] for place in self._places]

    def gather(self, local: Sequence[Tensor]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for place, part in zip(self._places, local, strict=True):
            whole = part.detach().to("cpu", torch.float32, copy=True)
            tensors.update(zip(place.names, whole.view(-1, *place.shape), strict=True))
        return tensors

    def scatter(self, logical: Mapping[str, np.ndarray]) -> list[Tensor]:
        names = [name for place in self._places for name in place.names]
        if wrong := sorted(set(names) ^ set(logical)):
            raise AdapterRefused(
                f"{len(wrong)} tensors are missing or have no place: {', '.join(wrong[:3])}",
                hint="the adapter was made for other modules",
            )
        stacks = []
        for place in self._places:
            for name in place.names:
                if logical[name].shape != place.shape:
                    raise AdapterRefused(
                        f"{name} has shape {logical[name].shape}, not {place.shape}",
                        hint="the adapter was made for another base or another rank",
                    )
            whole = np.stack([logical[name] for name in place.names])
            stacks.append(torch.tensor(whole, dtype=torch.float32).view(place.weight.shape))
        return stacks


class _Nameless(nn.Module):
    """A model without a config, by which PEFT would recognise mixtures and translate their targets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def _lora(config: AdapterConfig) -> LoraConfig:
    """Name the targets by one pattern of full names: with a list PEFT would also take names that end so."""
    names = "|".join(re.escape(name) for name in config.modules)
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_rslora=config.rslora,
        target_modules=rf"model\.(?:{names})",
    )
