"""Replaces what Megatron expects of a GPU in a rank that has none: only such a rank has this folder on its
PYTHONPATH.

Nothing is imported before Megatron is, so other interpreters that find this file are left as they are.
Written for megatron-bridge 0.6.2 and megatron-core 0.19.2 (which say Python 3.12 and run on 3.11).
"""

import builtins
import contextlib
import sys
import types
import typing
from typing import Any

_import = builtins.__import__
_LORA_LAYERS = "megatron.bridge.peft.lora_layers"


class _Stream:
    """The one there is: what is to be done on it is done already."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None: ...


def _all_to_all(output: Any, input: Any, *splits: Any, **more: Any) -> Any:
    """Megatron turns the counts into numbers only on their way off a GPU."""
    from torch.distributed.distributed_c10d import all_to_all_single

    for name in ("output_split_sizes", "input_split_sizes"):
        if more.get(name) is not None:
            more[name] = [int(count) for count in more[name]]
    return all_to_all_single(output, input, *splits, **more)


def _stand_in_for_cuda() -> None:
    """`current_device()` is where tensors are made; the generator's state is kept with each recomputed layer;
    experts are given their tokens on a stream of their own; the last stage of a pipeline is given the tied
    embedding.
    """
    import torch

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.random.get_rng_state = lambda device="cuda": torch.empty(0, dtype=torch.uint8)
    cuda.Stream = cuda.current_stream = _Stream
    cuda.stream = contextlib.nullcontext
    tensors: Any = torch.Tensor
    tensors.cuda = lambda self, *_, **__: self
    collectives: Any = torch.distributed
    collectives.all_to_all_single = _all_to_all


def _transformer_engine() -> Any:
    """What the module names that needs it only for its classes' signatures.

    In sys.modules, it would pass for real.
    """
    import torch
    from megatron.bridge.peft import utils

    utils.HAVE_TE = False  # said to be there, though each of its classes is None
    engine: Any = types.ModuleType("transformer_engine")
    engine.pytorch = types.ModuleType("transformer_engine.pytorch")
    engine.pytorch.Linear = engine.pytorch.LayerNormLinear = torch.nn.Module
    engine.pytorch.ops = types.SimpleNamespace(Sequential=torch.nn.Sequential)
    return engine


def _importing(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    if name.startswith("megatron") and "megatron" not in sys.modules:
        if not hasattr(typing, "override"):
            setattr(typing, "override", lambda function: function)  # noqa: B010
        _stand_in_for_cuda()
    if name == "transformer_engine.pytorch" and globals and globals.get("__name__") == _LORA_LAYERS:
        return _transformer_engine()
    return _import(name, globals, locals, fromlist, level)


builtins.__import__ = _importing
