"""What every operation on the fake device goes through.

torch's FakeTensorMode knows the shape, dtype and device of each tensor, and refuses operations between
devices. A build of torch for CPUs has no kernels or streams for CUDA, so its C++ is told that a fake tensor
is on the host, while Python still sees `cuda:0`; what C++ makes beside a tensor of the device is put right
here.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_gpu.device import CUDA, Attention, FakeGpu, is_pinned, known_value, on_gpu, remember, where

_FREE = re.compile(
    "empty|empty_like|empty_strided|new_empty|new_empty_strided|detach|alias|view|_unsafe_view|reshape|expand|"
    "as_strided|lift_fresh|resize_|set_|_reshape_alias|is_same_size|_local_scalar_dense|t|sym_size|device|"
    "transpose|permute|select|slice|split|split_with_sizes|unbind|unsqueeze|squeeze|chunk|unfold"
)
_COPIES = {"_to_copy", "copy_", "_copy_from", "to"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
_SIZED_BY_DATA = re.compile("nonzero|masked_select|_unique2|unique_dim|unique_consecutive|repeat_interleave")
_MASKS = (torch.bool, torch.uint8)


def _tensors(of: object) -> list[Tensor]:
    """Return the tensors in arguments or results, as torch's tree_leaves does, which takes longer."""
    if isinstance(of, Tensor):
        return [of]
    if isinstance(of, dict):
        of = of.values()
    elif not isinstance(of, tuple | list):
        return []
    return [tensor for each in of for tensor in _tensors(each)]


class Composites(TorchFunctionMode):
    """Notes that a function of torch has tensors of the device and names no device itself."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        before = self._gpu.beside
        self._gpu.beside = kwargs.get("device") is None and any(map(on_gpu, _tensors((args, kwargs))))
        try:
            return func(*args, **kwargs)
        finally:
            self._gpu.beside = before


class Meter(TorchDispatchMode):
    """Counts kernels, reads and copies, and refuses what a capture forbids."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        gpu = self._gpu
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        inputs = _tensors((args, kwargs))
        if name == "_local_scalar_dense" and on_gpu(args[0]):
            gpu.read("item", args[0])
            return gpu.values(args[0]).reshape(-1)[0].item()
        if name == "index" and any(on_gpu(x) and x.dtype in _MASKS for x in args[1] or []):
            return self._indexed_by_mask(args)
        if name in _INDEXED and on_gpu(args[0]):
            for index in args[1]:
                if isinstance(index, Tensor) and not on_gpu(index):
                    gpu.write("index from the host", index)
        if _SIZED_BY_DATA.fullmatch(name) and any(map(on_gpu, inputs)) and kwargs.get("output_size") is None:
            gpu.read(name, inputs[0])
            if name == "repeat_interleave":
                kwargs["output_size"] = int(gpu.values(inputs[0]).sum())
        if name == "_scaled_dot_product_efficient_attention":  # asked for by name, for its logsumexp
            mask = str(args[3].dtype).removeprefix("torch.")
            gpu.attentions[Attention("efficient", mask, False, where())] += 1
        if name in ("sort", "argsort"):
            gpu.sorted = inputs[0].numel()
        on_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if gpu.beside and on_host:
            kwargs["device"] = CUDA
        out = func(*args, **kwargs)
        outputs = _tensors(out)
        gpu.hold(outputs)
        if any(map(on_gpu, outputs)) or any(map(on_gpu, inputs)):
            self._count(func, name, args, outputs)
        return out

    def _indexed_by_mask(self, args: Sequence[Any]) -> Tensor:
        """Index by truth values: the host waits for how many there are, which must be known here."""
        mask = next(index for index in args[1] if index is not None)
        self._gpu.read("boolean index", mask)
        value = known_value(mask)
        if value is None:
            raise RuntimeError(f"boolean index of a size that only the device knows, at {where()}")
        out: Tensor = args[0].new_empty((int(value.sum()), *args[0].shape[mask.dim() :]))
        self._gpu.launch("index")
        self._gpu.hold([out])
        return out

    def _count(self, func: Any, name: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        """Count one operation that has to do with the device: a copy either way, or a kernel."""
        gpu = self._gpu
        if name not in _COPIES:
            if not _FREE.fullmatch(name) and not getattr(func, "is_view", False):
                gpu.launch(name)
            return
        source = args[1] if name in ("copy_", "_copy_from") else args[0]
        target = outputs[0] if outputs else args[0]
        if on_gpu(source) and on_gpu(target):
            gpu.launch(name)
        elif on_gpu(source):
            remember(target, gpu.values(source))
            if not is_pinned(target):
                gpu.read("copy to the host", source)
        else:
            gpu.write("copy from the host", source)
            known = known_value(source)
            if known is not None and known.shape == tuple(target.shape):
                remember(target, known)
