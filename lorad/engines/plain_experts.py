"""A mixture of experts with adapters in plain torch, for servers on a CPU: their own kernels need a GPU.

`sglang/launch.py` and `vllm/launch.py` run this file by its path, where lorad need not be installed.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F

_Delta = Callable[[int, int, torch.Tensor], torch.Tensor]
"""(slot, expert, rows [n, in]) -> what the adapter in that slot adds, [n, out]."""


def plain_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    slots: torch.Tensor,
    of_gate_up: _Delta,
    of_down: _Delta,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, whose MLPs use silu, in the shape of `x`.

    x: the hidden states, [tokens, hidden].
    index: the experts of each token, [tokens, per token].
    weights: the weight of each of these experts, [tokens, per token].
    gate_up: the first matrices of all experts, [experts, 2 * width, hidden].
    down: the second matrices of all experts, [experts, hidden, width].
    slots: the slot of each token's adapter, [tokens]; below 0 a token has none.
    of_gate_up: computes what an adapter adds to the output of `gate_up`.
    of_down: computes what an adapter adds to the output of `down`.
    """
    outputs = torch.zeros(*index.shape, x.shape[1], dtype=torch.float32, device=x.device)
    for expert in index.unique().tolist():
        tokens, place = (index == expert).nonzero(as_tuple=True)
        rows = x[tokens]
        owners = slots[tokens]
        inner = _added(F.linear(rows, gate_up[expert]), rows, owners, expert, of_gate_up)
        gate, up = inner.chunk(2, dim=-1)
        inner = F.silu(gate) * up
        outer = _added(F.linear(inner, down[expert]), inner, owners, expert, of_down)
        outputs[tokens, place] = outer.float()
    return (outputs * weights.unsqueeze(-1).float()).sum(1).to(x.dtype)


def _added(
    y: torch.Tensor, x: torch.Tensor, owners: torch.Tensor, expert: int, delta: _Delta
) -> torch.Tensor:
    for slot in owners.unique().tolist():
        if slot >= 0:
            mine = owners == slot
            y[mine] += delta(slot, expert, x[mine])
    return y
