"""A GPU that computes nothing: what happens on it is counted, and refused where a GPU would refuse it."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_T = TypeVar("_T")

CUDA = torch.device("cuda", 0)
_ALIGNED = 512  # bytes that CUDA's allocator rounds up to
_TRANSPARENT = ("/tests/fake_gpu/", "/torch/", "contextlib", "<")  # files that are on the way to everything


class CaptureError(RuntimeError):
    """A CUDA graph that is captured cannot hold this."""


class Transfer(NamedTuple):
    """A copy between host and device, for which the host waits."""

    what: str
    place: str
    bytes: int


class Attention(NamedTuple):
    """One way in which attention was computed."""

    kernel: str  # cudnn, flash, efficient, or math: the plain one, which keeps all scores
    mask: str  # its dtype, or none
    backward: bool
    place: str


class Graph:
    """What stands for a captured CUDA graph."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.replays = 0


def on_gpu(x: object) -> TypeGuard[Tensor]:
    """Say whether this is a tensor on the fake device."""
    return isinstance(x, Tensor) and x.device.type == "cuda"


def remember(x: Tensor, value: NDArray[Any]) -> None:
    """Keep what a fake tensor holds."""
    x._fake_gpu_value = value  # type: ignore[attr-defined]


def known_value(x: Tensor) -> NDArray[Any] | None:
    """Return what a fake tensor holds, where it was made from an array."""
    return getattr(x, "_fake_gpu_value", None)


def pin(x: Tensor) -> None:
    """Say that a tensor of the host is in pinned memory, which can be copied while the host goes on."""
    x._fake_gpu_is_pinned = True  # type: ignore[attr-defined]


def is_pinned(x: Tensor) -> bool:
    """Say whether `pin` was called of this tensor."""
    return getattr(x, "_fake_gpu_is_pinned", False)


class FakeGpu:
    """Counts of one fake device.

    kernels: launches outside of graphs, by name.
    reads, writes: copies from and to the device for which the host waits.
    sent: copies to the device out of pinned memory, for which it does not wait.
    attentions: how often each way of computing attention was taken.
    plans: shapes for which cuDNN would have built a plan.
    bytes, peak: bytes that live on the device now, and at most since the last `forget`.
    fill: an array for a tensor that the host reads, where ones would not do.
    """

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability
        self.memory = 80 << 30
        self.kernels: Counter[str] = Counter()
        self.reads: list[Transfer] = []
        self.writes: list[Transfer] = []
        self.sent: list[Transfer] = []
        self.attentions: Counter[Attention] = Counter()
        self.plans: set[object] = set()
        self.graphs: list[Graph] = []
        self.bytes = 0
        self.peak = 0
        self.fill: Callable[[Tensor], NDArray[Any] | None] = lambda tensor: None
        self.sorted = 0  # numbers in what was sorted last
        self.capturing: Graph | None = None
        self.beside = False  # within a function of torch that has tensors of the device
        self._within_kernel = 0
        self._live: dict[int, int] = {}

    def forget(self) -> None:
        """Begin all counts anew; what lives on the device stays there."""
        transfers = (self.reads, self.writes, self.sent)
        for counts in (self.kernels, *transfers, self.attentions, self.plans, self.graphs):
            counts.clear()
        self.peak = self.bytes

    def launch(self, name: str) -> None:
        """Count a kernel, of the graph that is captured or of the host's."""
        if not self._within_kernel:
            counts = self.kernels if self.capturing is None else self.capturing.kernels
            counts[name] += 1

    def as_one(self, name: str, work: Callable[[], _T]) -> _T:
        """Count what is one kernel on a GPU, and several operations here."""
        self.launch(name)
        self._within_kernel += 1
        try:
            return work()
        finally:
            self._within_kernel -= 1

    def read(self, what: str, tensor: Tensor) -> None:
        """Count a read of the device by the host; raises CaptureError while a graph is captured."""
        if self.capturing is not None:
            raise CaptureError(f"{what}: the host reads the device while a graph is captured, at {where()}")
        self.reads.append(Transfer(what, where(), tensor.numel() * tensor.element_size()))

    def write(self, what: str, tensor: Tensor) -> None:
        """Count a copy of the host's memory; raises CaptureError while a graph is captured."""
        if self.capturing is not None and tensor.dim():
            raise CaptureError(f"{what}: the host's memory is copied while a graph is captured, at {where()}")
        if tensor.dim():
            copies = self.sent if is_pinned(tensor) else self.writes
            copies.append(Transfer(what, where(), tensor.numel() * tensor.element_size()))

    def values(self, tensor: Tensor) -> NDArray[Any]:
        """Return what the host reads: what is known of a tensor, else ones (log-probabilities: -1)."""
        known = known_value(tensor)
        if known is None:
            known = self.fill(tensor)
        if known is not None:
            return known
        half = tensor.dtype == torch.bfloat16
        dtype = np.dtype(np.float32 if half else str(tensor.dtype).removeprefix("torch."))
        value = -1 if dtype == np.float32 else 1  # float64 are tokens beside their log-probabilities
        return np.full(tuple(tensor.shape), value, dtype)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count the bytes of tensors that are new on the device until they are freed."""
        for tensor in filter(on_gpu, tensors):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live:
                continue
            self._live[key] = -(-storage.nbytes() // _ALIGNED) * _ALIGNED
            self.bytes += self._live[key]
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.bytes -= self._live.pop(key, 0)


def where() -> str:
    """Return the innermost line that is neither torch's nor of these tests."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not any(part in code.co_filename for part in _TRANSPARENT):
            return f"{code.co_filename.rpartition('/lorad/')[2]}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "an unknown place"
