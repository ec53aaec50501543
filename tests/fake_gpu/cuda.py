"""torch with a fake GPU in it, for the length of a `with`."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # what it imports reads what is patched below, so it comes first
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from lorad.models import ops
from tests.fake_gpu.attention import FakeAttention
from tests.fake_gpu.device import CUDA, FakeGpu, Graph, on_gpu, pin, remember
from tests.fake_gpu.modes import Composites, Meter

_tolist = Tensor.tolist
_numpy = Tensor.numpy
_to = Tensor.to
_from_numpy = torch.from_numpy
_rms_norm = functional.rms_norm
_own_rms_norm = ops._rms_norm
_Generator = torch.Generator


@contextmanager
def fake_gpu(grad: bool = False, capability: int = 90) -> Iterator[FakeGpu]:
    """Have a fake `cuda:0`, with or without gradients."""
    gpu = FakeGpu(capability)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # torch says so once of a generator's state, which is not on the device
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        _replace_cuda(gpu, patch)
        _replace_reads(gpu, patch)
        _replace_kernels(gpu, patch)
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(Composites(gpu))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Meter(gpu))
        yield gpu


def _replace_cuda(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    """Put streams, graphs and figures of the fake device in the place of CUDA's."""

    class FakeStream:
        def __init__(self, *args: object, **kwargs: object) -> None:
            pass

        def wait_stream(self, other: object) -> None:
            pass

        def synchronize(self) -> None:
            gpu.read("synchronize", torch.empty(0))

    class FakeGraph(Graph):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__()
            gpu.graphs.append(self)

        def replay(self) -> None:
            self.replays += 1
            gpu.launch("graph replay")

    @contextmanager
    def capture(into: FakeGraph, **kwargs: object) -> Iterator[None]:
        assert gpu.capturing is None
        gpu.capturing = into
        try:
            yield
        finally:
            gpu.capturing = None

    @contextmanager
    def on_stream(stream: object) -> Iterator[None]:
        yield

    major, minor = divmod(gpu.capability, 10)
    properties = SimpleNamespace(
        total_memory=gpu.memory, name="NVIDIA H100 80GB HBM3", uuid="0" * 8, major=major, minor=minor
    )
    answers: dict[str, Any] = {
        "get_device_properties": properties,
        "current_device": 0,
        "device_count": 1,
        "graph_pool_handle": (0, 0),
        **dict.fromkeys(("_lazy_init", "empty_cache", "set_device", "synchronize")),
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    for name in ("memory_allocated", "memory_reserved"):
        patch.setattr(torch.cuda, name, lambda *args: gpu.bytes)
    patch.setattr(torch.cuda, "max_memory_allocated", lambda *args: gpu.peak)
    patch.setattr(torch.cuda, "current_stream", FakeStream)
    patch.setattr(torch.cuda, "Stream", FakeStream)
    patch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    patch.setattr(torch.cuda, "graph", capture)
    patch.setattr(torch.cuda, "stream", on_stream)


def _replace_reads(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    """Count what the host reads of the device, and give it numbers."""

    def tolist(x: Tensor) -> Any:
        if not isinstance(x, FakeTensor):
            return _tolist(x)
        if on_gpu(x):
            gpu.read("tolist", x)
        return gpu.values(x).tolist()

    def numpy(x: Tensor, **options: Any) -> Any:
        if not isinstance(x, FakeTensor):
            return _numpy(x, **options)
        if on_gpu(x):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        return gpu.values(x)

    def from_numpy(array: Any) -> Tensor:
        x = _from_numpy(array)
        remember(x, array)
        return x

    def pin_memory(x: Tensor) -> Tensor:
        remember(x, np.zeros(tuple(x.shape), str(x.dtype).removeprefix("torch.")))
        pin(x)
        return x

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _moved(gpu, x, args, kwargs) if isinstance(x, FakeTensor) else _to(x, *args, **kwargs)

    patch.setattr(FakeTensor, "data_ptr", lambda x: x.untyped_storage()._cdata)
    patch.setattr(Tensor, "tolist", tolist)
    patch.setattr(FakeTensor, "tolist", tolist)
    patch.setattr(Tensor, "numpy", numpy)
    patch.setattr(FakeTensor, "pin_memory", pin_memory)
    patch.setattr(Tensor, "to", to)
    patch.setattr(Tensor, "cpu", lambda x: to(x, "cpu"))
    patch.setattr(torch, "from_numpy", from_numpy)
    patch.setattr(FakeTensor, "is_cuda", property(lambda x: x.fake_device.type == "cuda"))


def _moved(gpu: FakeGpu, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Do what `Tensor.to` does, without asking C++ where the tensor is."""
    copy = kwargs.pop("copy", False)
    if args and isinstance(args[0], Tensor):
        device = args[0].device
        dtype = args[0].dtype
    else:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    wanted = {"device": CUDA if str(device).startswith("cuda") else device, "dtype": dtype}
    changed = {
        name: value for name, value in wanted.items() if value is not None and value != getattr(x, name)
    }
    if not changed and not copy:
        return x
    before = gpu.beside
    gpu.beside = False
    try:
        out: Tensor = torch.ops.aten._to_copy(x, **changed)
        return out
    finally:
        gpu.beside = before


def _replace_kernels(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    """Put one kernel for each fused one of CUDA, and keep C++ from looking for CUDA."""

    def normed(x: Tensor) -> tuple[Tensor, Tensor]:
        root = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
        return torch.empty_like(x), root

    def own_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return gpu.as_one("rms_norm", lambda: normed(x)) if on_gpu(x) else _own_rms_norm(x, weight, eps)

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if not on_gpu(x):
            return _rms_norm(x, shape, weight, eps)
        return gpu.as_one("rms_norm", lambda: normed(x))[0]

    class HostGenerator(_Generator):
        def __new__(cls, device: object = "cpu") -> "HostGenerator":
            return _Generator.__new__(cls, "cpu")  # type: ignore[call-arg]

    asked: dict[Any, Callable[..., Any]] = fake_tensor._DISPATCH_META_HANDLERS
    patch.setitem(asked, torch.ops.prim.device.default, lambda args: torch.device("cpu"))
    patch.setattr(ops, "_rms_norm", own_rms_norm)
    patch.setattr(functional, "rms_norm", rms_norm)
    patch.setattr(functional, "scaled_dot_product_attention", FakeAttention(gpu))
    patch.setattr(torch, "Generator", HostGenerator)
