"""Makes vLLM 0.32 run on a CPU where it has no kernels: for tests, on PYTHONPATH, never part of lorad.

- torchvision is a CUDA build whose operators do not load: they are declared, so that it imports.
- Gated delta nets are computed in plain torch.
- `LORAD_FORKS=1`: its processes are forks of the first one, which has imported what they need.
"""

import os
from typing import Any

from at_import import after_import, before_import


def declare_torchvision_operators() -> None:
    from torchvision_operators import declare

    declare()


def mend_gated_delta(module: object) -> None:
    from plain_delta import mend_vllm

    mend_vllm(module)


def fork_processes(module: Any) -> None:
    """vLLM's engine and its worker are spawned on a CPU, and import for ten seconds each."""
    import multiprocessing

    module.get_mp_context = lambda: multiprocessing.get_context("fork")


before_import("torchvision", declare_torchvision_operators)
after_import("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention", mend_gated_delta)
if os.environ.get("LORAD_FORKS"):
    after_import("vllm.utils.system_utils", fork_processes)
