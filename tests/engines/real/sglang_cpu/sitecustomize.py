"""Makes SGLang 0.5.23 run on a CPU where it has no kernels: for tests, on PYTHONPATH, never part of lorad.

- torchvision is a CUDA build whose operators do not load: their two schemas are declared, so that it imports.
- The torch_native LoRA backend asks for pinned memory, which torch has only with an accelerator: it gets
    plain memory.
- `sgl_kernel` beside this file stands in for the kernels.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like")
_kept: list[Any] = []


def declare_torchvision_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def without_pinning(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return factory(*args, **options)

    return make


def drop_pinned_memory() -> None:
    import torch
    from torch.utils._device import _device_constructors

    # it caches the factories as they are now: later, `with torch.device(...)` would miss them
    _device_constructors()
    for name in FACTORIES:
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_args, **_options: self  # type: ignore[method-assign]


def fork_processes() -> None:
    """SGLang's processes are spawned, and import for eight seconds each."""
    import multiprocessing

    set_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_method("fork", force)


# multiprocessing's tracker of its resources, a process of each server, does without torch
IS_TRACKER = any("resource_tracker" in word for word in sys.orig_argv)
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and not IS_TRACKER:
    # the sampler is compiled else, which takes longer than the tests
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    declare_torchvision_operators()
    drop_pinned_memory()
    if os.environ.get("LORAD_FORKS"):
        fork_processes()
