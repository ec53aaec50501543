"""An adapter inside the model: Bridge's own modules around Megatron's, put in and taken out again.

Bridge exports what is cut over tensor-parallel ranks and over stages; experts are gathered by `experts`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorad.adapters.validate import expected_shapes
from lorad.errors import AdapterRefused
from lorad.trainers.megatron.experts import from_all_ranks
from lorad.trainers.megatron.targets import HEAD, MegatronModule, members
from lorad.trainers.sharded.body import Mounted, MountKey

_Index = slice | np.ndarray
_Export = Callable[[], Iterator[tuple[str, Tensor]]]
_SIDES = {"lora_A": "linear_in", "lora_B": "linear_out"}
_ALL = slice(None)


@dataclass(frozen=True)
class _Piece:
    """A tensor's place on this rank: `parameter[rows, columns]` is `tensor[from_rows, from_columns]`."""

    rows: _Index
    columns: _Index
    from_rows: _Index
    from_columns: _Index

    def copy(self, tensor: np.ndarray, parameter: np.ndarray) -> None:
        parameter[_grid(self.rows, self.columns)] = tensor[_grid(self.from_rows, self.from_columns)]


Layout = dict[str, _Piece]


def _numbered(shape: tuple[int, int], rank: int, axis: int) -> Tensor:
    """Number the rows (axis 0) or columns over all ranks, exactly: both are far below 2**24."""
    line = torch.arange(shape[axis], dtype=torch.float32) + rank * shape[axis]
    return (line[:, None] if axis == 0 else line[None]).expand(shape).contiguous()


def _short(index: np.ndarray) -> _Index:
    """Return an index of neighbours as a slice, as most layouts are."""
    first = int(index[0])
    last = int(index[-1])
    return slice(first, last + 1) if np.array_equal(index, np.arange(first, last + 1)) else index


def _grid(rows: _Index, columns: _Index) -> tuple[_Index, _Index]:
    if isinstance(rows, np.ndarray) and isinstance(columns, np.ndarray):
        return rows[:, None], columns[None]
    return rows, columns


@dataclass(frozen=True)
class Wrapped:
    """A module, its wrapper, and the flags that Bridge sets on it (on Transformer Engine's only)."""

    target: MegatronModule
    original: nn.Module
    wrapper: nn.Module
    flags: Mapping[str, object]

    def enable(self, on: bool) -> None:
        """Switch the adapter. Off, the module computes what the original does."""
        wrapper: Any = self.wrapper
        if on:
            wrapper.enable_adapter_layers()
        else:
            wrapper.disable_adapter_layers()

    def put(self, model: nn.Module, module: nn.Module) -> None:
        """Put the original or the wrapper into the model."""
        parent, _, name = self.target.path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)


def wrap(model: nn.Module, targets: Sequence[MegatronModule], key: MountKey) -> list[Wrapped]:
    """Put fresh adapters, all zeros, around the modules.

    Raises AdapterRefused, and leaves the model as it was, where Bridge wraps nothing.
    """
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.lora import LoRA

    of_rank: dict[int, Any] = {}
    wrapped: list[Wrapped] = []
    try:
        for target in targets:
            module = next(iter(target.members.values()))
            rank = key.adapter.rank_of(module)
            if rank not in of_rank:
                # Bridge's LoRA scales by alpha / dim. Its own draw of A is left out: it would move the
                # generators, and means nothing.
                peft: Any = (CanonicalLoRA if key.lora_type == "canonical_lora" else LoRA)(
                    dim=rank,
                    alpha=key.adapter.scale_of(module) * rank,
                    dropout=key.adapter.dropout,
                    lora_A_init_method="zero",
                )
                peft.target_modules = [*peft.target_modules, "output_layer"]
                peft._init_target_match_state()
                of_rank[rank] = peft
            original = model.get_submodule(target.path)
            flags = {
                name: value
                for name, value in vars(original).items()
                if name.startswith("return_layernorm_output")
            }
            parent, _, name = target.path.rpartition(".")
            wrapper = of_rank[rank].transform(original, name=name, prefix=parent)
            if wrapper is original or not hasattr(wrapper, "to_wrap"):
                raise AdapterRefused(f"Bridge puts no adapter on {next(iter(target.members.values()))}")
            setattr(model.get_submodule(parent), name, wrapper)
            # members of a fused module that were not asked for get zeros, which stay: Bridge's forward needs
            # every member
            if isinstance(wrapper.adapter, nn.ModuleDict):
                for member in set(members(target)) - set(target.members):
                    wrapper.adapter[member].requires_grad_(False)
            wrapped.append(Wrapped(target, original, wrapper, flags))
    except BaseException:
        unwrap(model, wrapped)
        raise
    return wrapped


def unwrap(model: nn.Module, wrapped: Sequence[Wrapped]) -> None:
    """Take the adapters out, so that the model is exactly what it was."""
    for module in wrapped:
        module.put(model, module.original)
        vars(module.original).update(module.flags)


class MegatronMounted(Mounted):
    """An adapter whose tensors are cut over ranks as Megatron cuts its modules.

    Args:
        targets: The adapted modules of the whole model.
        wrapped: The adapted modules of this rank; `_holders` and the layout have these alone, experts last.
        export: Yields the model's adapter tensors, except those of experts.
        group: The ranks that have all experts between them.
    """

    def __init__(
        self,
        targets: Sequence[MegatronModule],
        wrapped: Sequence[Wrapped],
        key: MountKey,
        export: _Export,
        shapes: Mapping[str, tuple[int, int]],
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self._export = export
        self._device = device
        self._group = group
        self._shapes = shapes
        expected = expected_shapes(key.adapter, shapes)
        modules = [list(target.members.values()) for target in targets]
        self._sharing = modules if key.lora_type == "lora" else []
        self._experts: dict[str, dict[str, tuple[int, ...]]] = {}  # by layer
        for target in (target for target in targets if target.is_of_expert):
            layer = self._experts.setdefault(target.path.partition(".mlp.")[0], {})
            names = [f"{name}.{side}.weight" for name in target.members.values() for side in _SIDES]
            layer.update({name: expected[name] for name in names})
        self._names = expected.keys() - {name for layer in self._experts.values() for name in layer}
        self._numbers: dict[nn.Module, int] = {}
        self._holder: dict[str, int] = {}
        self._own: Layout = {}  # of this rank's experts
        for module in (module for module in wrapped if not module.target.is_of_expert):
            self._enter(module)
        self._dense = len(self._numbers)
        for module in (module for module in wrapped if module.target.is_of_expert):
            self._enter(module)
        self._holders = list(self._numbers)
        self.expert_parameters = len(self._holders) - self._dense  # the last ones
        self.parameters = [holder.get_parameter("weight") for holder in self._holders]
        numbers = {number for name, number in self._holder.items() if ".lora_B." in name}
        self.are_b = [number in numbers for number in range(len(self._holders))]
        self.layout: Layout = {}

    def _enter(self, wrapped: Wrapped) -> None:
        """Note which parameter holds which logical tensor.

        Fused members share A, and a B in which an expert's members follow each other.
        """
        adapter = wrapped.wrapper.get_submodule("adapter")
        for member, name in wrapped.target.members.items():
            split = bool(member) and isinstance(adapter, nn.ModuleDict)
            out = self._shapes[name][0]
            first = 0 if split else members(wrapped.target).index(member) * out
            for side, linear in _SIDES.items():
                module = adapter.get_submodule(f"{member}.{linear}" if split else linear)
                self._holder[f"{name}.{side}.weight"] = self._numbers.setdefault(module, len(self._numbers))
                if wrapped.target.is_of_expert:
                    rows = slice(first, first + out) if side == "lora_B" else _ALL
                    self._own[f"{name}.{side}.weight"] = _Piece(rows, _ALL, _ALL, _ALL)

    def learn_layout(self, rank: int) -> None:
        """Learn for `scatter` which piece of each tensor is here, on number `rank` of those that cut it.

        Collective. Raises AdapterRefused where Bridge exports less than was asked for, or an expert is not on
        exactly one of the ranks of `group`.
        """
        shapes = [(p.shape[0], p.shape[1]) for p in self.parameters[: self._dense]]
        holder = {name: number for name, number in self._holder.items() if name not in self._own}
        rows = self._exported([_numbered(shape, rank, 0) for shape in shapes])
        columns = self._exported([_numbered(shape, rank, 1) for shape in shapes])
        self.layout = {}
        for name, number in holder.items():
            row_numbers, column_numbers = (each[name].numpy().astype(np.int64) for each in (rows, columns))
            is_here = row_numbers // shapes[number][0] == rank
            from_rows = np.flatnonzero(is_here.any(1))
            from_columns = np.flatnonzero(is_here.any(0))
            self.layout[name] = _Piece(
                rows=_short(row_numbers[from_rows, from_columns[0]] % shapes[number][0]),
                columns=_short(column_numbers[from_rows[0], from_columns] % shapes[number][1]),
                from_rows=_short(from_rows),
                from_columns=_short(from_columns),
            )
        self.layout |= self._own
        names = [name for layer in self._experts.values() for name in layer]
        counts = torch.tensor([name in self._own for name in names], dtype=torch.int32, device=self._device)
        dist.all_reduce(counts, group=self._group)
        if wrong := [name for name, count in zip(names, counts.tolist(), strict=True) if count != 1]:
            raise AdapterRefused(f"not exactly one of the ranks that share the experts has {wrong[0]}")

    def gather(self, local: Sequence[Tensor]) -> dict[str, Tensor]:
        tensors = self._exported(local[: self._dense])
        own = {name: local[self._holder[name]][piece.rows] for name, piece in self._own.items()}
        for shapes in self._experts.values():
            tensors |= from_all_ranks(shapes, own, self._group, self._device)
        return tensors

    def _exported(self, local: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return what Bridge exports, all but the experts, with `local` in the place of the weights."""
        tensors: dict[str, Tensor] = {}
        if not self._names:
            return tensors
        holders = self._holders[: self._dense]
        try:
            for holder, part in zip(holders, local, strict=True):
                moved = part.detach().to(self._device, torch.float32).contiguous()
                holder.weight = nn.Parameter(moved, requires_grad=False)
            for name, tensor in self._export():
                if name == f"{HEAD}.lora_B.weight":  # Megatron pads a vocabulary
                    tensor = tensor[: self._shapes[HEAD][0]]
                if name in self._names:
                    tensors[name] = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        finally:
            for holder, weight in zip(holders, self.parameters[: self._dense], strict=True):
                holder.weight = weight
        if tensors.keys() != self._names:
            raise AdapterRefused(f"Bridge exports no {min(self._names - tensors.keys())}")
        return tensors

    def scatter(self, logical: Mapping[str, np.ndarray]) -> list[Tensor]:
        for first, *others in self._sharing:  # of all stages, so that all refuse the same
            for other in others:
                if not np.array_equal(logical[f"{first}.lora_A.weight"], logical[f"{other}.lora_A.weight"]):
                    raise AdapterRefused(
                        f"fused LoRA shares A over {first} and {other}, but theirs differ",
                        hint="such an adapter needs lora.type: canonical_lora",
                    )
        parts = [np.zeros(p.shape, np.float32) for p in self.parameters]
        for name, piece in self.layout.items():
            piece.copy(logical[name], parts[self._holder[name]])
        return [torch.from_numpy(part) for part in parts]
