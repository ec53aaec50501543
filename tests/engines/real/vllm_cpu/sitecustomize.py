"""Makes vLLM 0.32 run on a CPU where it has no kernels: for tests, on PYTHONPATH, never part of lorad.

- torchvision is a CUDA build whose operators do not load: they are declared, so that it imports.
- Gated delta nets are computed in plain torch.
"""

from at_import import after_import, before_import


def declare_torchvision_operators() -> None:
    from torchvision_operators import declare

    declare()


def mend_gated_delta(module: object) -> None:
    from plain_delta import mend_vllm

    mend_vllm(module)


before_import("torchvision", declare_torchvision_operators)
after_import("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention", mend_gated_delta)
