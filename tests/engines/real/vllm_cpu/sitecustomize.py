"""Makes vLLM 0.32 run on a CPU where it has no kernels: for tests, on PYTHONPATH, never part of lorad.

- torchvision is a CUDA build whose operators do not load: they are declared, so that it imports.
- Gated delta nets are computed in plain torch.
- What `/server_info` says of the machine, which nobody here reads, is empty: three calls of pip and more.
- An import makes a million objects that stay, and the collector looks through them less often.
- `LORAD_FORKS=1`: its processes are forks of the first one, which has imported what they need.
- A process that waits for another one sleeps; it would look again and again for a second first.
- The cache of 1 GiB takes the memory that is written to.
"""

import gc
import os
from typing import Any

from at_import import after_import, before_import


def declare_torchvision_operators() -> None:
    from torchvision_operators import declare

    declare()


def mend_gated_delta(module: object) -> None:
    from plain_delta import mend_vllm

    mend_vllm(module)


def describe_no_machine(module: Any) -> None:
    module.get_env_info = lambda: module.SystemEnv(*[""] * len(module.SystemEnv._fields))


def fork_processes(module: Any) -> None:
    """vLLM's engine and its worker are spawned on a CPU, and import for ten seconds each."""
    import multiprocessing

    def forking() -> Any:
        gc.freeze()  # each of them collects some times, and would look through all that was imported
        return multiprocessing.get_context("fork")

    module.get_mp_context = forking


def sleep_at_once(module: Any) -> None:
    module.SpinCondition.__init__.__defaults__ = (0,)


def allocate_lazily(module: Any) -> None:
    """Have memory for the cache where something is written: torch would write zeros into all of it."""
    import numpy as np
    import torch

    class Lazily:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def zeros(self, *size: int, dtype: Any, device: Any) -> torch.Tensor:
            if dtype is not torch.int8:
                return torch.zeros(*size, dtype=dtype, device=device)
            return torch.from_numpy(np.zeros(size, np.int8)).to(device)

    module.torch = Lazily()


gc.set_threshold(100_000, 50)  # 2.3 s of processor at each start, and 0.5 so
before_import("torchvision", declare_torchvision_operators)
after_import("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention", mend_gated_delta)
after_import("vllm.collect_env", describe_no_machine)
after_import("vllm.distributed.device_communicators.shm_broadcast", sleep_at_once)
after_import("vllm.v1.worker.utils", allocate_lazily)
if os.environ.get("LORAD_FORKS"):
    after_import("vllm.utils.system_utils", fork_processes)
