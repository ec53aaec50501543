"""Makes SGLang 0.5.23 run on a CPU where it has no kernels: for tests, on PYTHONPATH, never part of lorad.

- torchvision is a CUDA build whose operators do not load: they are declared, so that it imports.
- The torch_native LoRA backend asks for pinned memory, which torch has only with an accelerator: it gets
    plain memory.
- `sgl_kernel` beside this file stands in for the kernels.
- Gated delta nets are computed in plain torch.
- An import makes a million objects that stay, and the collector looks through them less often.
"""

import functools
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

from at_import import after_import

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like")


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


def mend_gated_delta(module: object) -> None:
    from plain_delta import mend_sglang

    mend_sglang(module)


def mend_gated_norm(module: object) -> None:
    from plain_delta import mend_sglang_norm

    mend_sglang_norm(module)


# multiprocessing's tracker of its resources, a process of each server, does without torch
IS_TRACKER = any("resource_tracker" in word for word in sys.orig_argv)
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and not IS_TRACKER:
    gc.set_threshold(100_000, 50)  # 2.1 s of processor at each start, and 0.4 so
    # the sampler is compiled else, which takes longer than the tests
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from torchvision_operators import declare

    declare()
    drop_pinned_memory()
    after_import("sglang.srt.layers.attention.linear.gdn_backend", mend_gated_delta)
    after_import("sglang.kernels.ops.attention.fla.layernorm_gated", mend_gated_norm)
    if os.environ.get("LORAD_FORKS"):
        fork_processes()
