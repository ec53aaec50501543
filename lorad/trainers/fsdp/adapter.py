"""Room for one adapter in a model that is about to be sharded, by PEFT.

PEFT reads the sizes of a linear off its weight, of which a rank holds only some rows after sharding. So all
linears are wrapped before, with an adapter that is thrown away after; PEFT's wrappers stay and remember their
sizes.
"""

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lorad.adapters.adapter import AdapterConfig
from lorad.errors import AdapterRefused
from lorad.trainers.sharded.body import Mounted, MountKey

_NAME = "mounted"
_HALVES = ("lora_A", "lora_B")


def is_adapter(parameter: str) -> bool:
    """Return whether a parameter of this name is no part of the base."""
    return any(f".{half}.{_NAME}." in parameter for half in _HALVES)


class AdapterRoom:
    """What PEFT puts into one model. It holds an adapter from the beginning: see `parameters`."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, int]]) -> None:
        self.shapes = dict(shapes)
        self._holds = True
        self._adapted: list[Any] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks for what transformers has deprecated
            config = _lora(AdapterConfig(1, 1.0, tuple(shapes)))
            self._peft: Any = get_peft_model(_Nameless(model), config, _NAME, low_cpu_mem_usage=True)
        self._linears: dict[str, Any] = {name: model.get_submodule(name) for name in shapes}

    def parameters(self) -> set[nn.Parameter]:
        """Return the adapter's parameters, which `fully_shard` must ignore; call `clear` once it is done."""
        return {parameter for name, parameter in self._peft.named_parameters() if is_adapter(name)}

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """Leaves in `shapes` the linears that are called meanwhile: others give their weights away past any
        adapter.
        """
        called: set[str] = set()
        hooks = [
            linear.register_forward_hook(lambda *_, name=name: called.add(name))
            for name, linear in self._linears.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.shapes = {name: shape for name, shape in self.shapes.items() if name in called}

    def clear(self) -> None:
        """Take the adapter out of the model."""
        self._adapted = []
        if self._holds:
            self._peft.delete_adapter(_NAME)
            self._holds = False

    def put(self, key: MountKey, dtype: torch.dtype, device: torch.device) -> "_ReplicatedAdapter":
        """An adapter of zeros on exactly the modules of `key`, in the place of the one that is there.

        Raises AdapterRefused, and holds none, for modules that the model does not have.
        """
        self.clear()
        config = key.adapter
        unknown = sorted(set(config.modules) - set(self.shapes))
        if unknown or not config.modules or config.rank < 1:
            raise AdapterRefused(
                f"no adapter of rank {config.rank} fits "
                f"{', '.join(unknown[:3]) or f'{len(config.modules)} modules'}",
                hint=f"the {len(self.shapes)} linears of the base have names like {next(iter(self.shapes))}",
            )
        self._peft.add_adapter(_NAME, _lora(config), low_cpu_mem_usage=True)
        self._holds = True
        self._check_places(config)
        weights = [self._fill(name, half, dtype, device) for name in config.modules for half in _HALVES]
        self._peft.set_adapter(_NAME)
        self._adapted = [self._linears[name] for name in config.modules]
        return _ReplicatedAdapter(config, weights)

    @contextlib.contextmanager
    def acting(self, adapter: bool, train: bool) -> Iterator[None]:
        """Set whether the adapter and its dropout act inside the block."""
        for linear in self._adapted:
            linear.lora_dropout[_NAME].train(train)
        if adapter:
            yield
            return
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        for linear in self._adapted:
            linear.enable_adapters(on)

    def _check_places(self, config: AdapterConfig) -> None:
        placed = {name for name, linear in self._linears.items() if _NAME in linear.lora_A}
        if placed != set(config.modules):
            self.clear()
            wrong = sorted(placed ^ set(config.modules))
            raise AdapterRefused(
                f"PEFT would put the adapter on {len(placed)} modules instead of {len(config.modules)}: "
                f"{', '.join(wrong[:3])}",
                hint="use another version of peft",
            )

    def _fill(self, name: str, half: str, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        linear = getattr(self._linears[name], half)[_NAME]
        linear.weight = nn.Parameter(torch.zeros(linear.weight.shape, dtype=dtype, device=device))
        return linear.weight  # type: ignore[no-any-return]


class _ReplicatedAdapter(Mounted):
    """Every rank holds all of it: A then B of each module, in the order of the configuration."""

    def __init__(self, config: AdapterConfig, weights: Sequence[nn.Parameter]) -> None:
        self._names = [f"{module}.{half}.weight" for module in config.modules for half in _HALVES]
        self._weights = list(weights)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return self._weights

    def gather(self, local: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            name: part.detach().to("cpu", torch.float32, copy=True)
            for name, part in zip(self._names, local, strict=True)
        }

    def scatter(self, logical: Mapping[str, np.ndarray]) -> list[Tensor]:
        if wrong := sorted(set(self._names) ^ set(logical)):
            raise AdapterRefused(
                f"{len(wrong)} tensors are missing or have no place: {', '.join(wrong[:3])}",
                hint="the adapter was made for other modules",
            )
        for name, weight in zip(self._names, self._weights, strict=True):
            if logical[name].shape != tuple(weight.shape):
                raise AdapterRefused(
                    f"{name} has shape {logical[name].shape}, not {tuple(weight.shape)}",
                    hint="the adapter was made for another base or another rank",
                )
        return [torch.tensor(logical[name], dtype=torch.float32) for name in self._names]


class _Nameless(nn.Module):
    """PEFT translates targets for the mixtures of experts that it recognises by a config:
    here it finds none.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def _lora(config: AdapterConfig) -> LoraConfig:
    """One pattern over full names: of a list PEFT also takes what ends in an entry."""
    names = "|".join(re.escape(name) for name in config.modules)
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_rslora=config.rslora,
        target_modules=rf"model\.(?:{names})",
    )
