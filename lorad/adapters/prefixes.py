"""Renames adapters of other tools, and of classes of transformers, whose prefix before `layers` differs."""

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from lorad.adapters.adapter import Adapter, Outline
from lorad.adapters.targets import renamed


def outline_for(base: Collection[str], outlined: Outline) -> Outline:
    """Return an outline by the names of a base's linears. Raises SpecError as `renamed` does."""
    names = renamed(outlined.config.modules, base)
    if outlined.fused or _is_own(names):
        return outlined
    named = outlined.named
    if named.targets is not None:
        named = named._replace(targets=frozenset(renamed(named.targets, base).values()))
    config = replace(outlined.config, modules=tuple(sorted(names.values())))
    shapes = {_tensor(name, names): shape for name, shape in outlined.shapes.items()}
    return outlined._replace(config=config, shapes=shapes, named=named)


def adapter_for(base: Collection[str], adapter: Adapter) -> Adapter:
    """Return an adapter by the names of a base's linears. Raises SpecError as `renamed` does."""
    names = renamed(adapter.config.modules, base)
    if _is_own(names):
        return adapter
    config = replace(adapter.config, modules=tuple(sorted(names.values())))
    tensors = {_tensor(name, names): tensor for name, tensor in adapter.tensors.items()}
    return Adapter(config, dict(sorted(tensors.items())))


def _is_own(names: Mapping[str, str]) -> bool:
    """Return whether there is nothing to rename, or two modules would get the same name."""
    return len({*names.values()}) < len(names) or all(name == own for name, own in names.items())


def _tensor(name: str, names: Mapping[str, str]) -> str:
    module = name.rpartition(".lora_")[0]
    return names[module] + name.removeprefix(module)
