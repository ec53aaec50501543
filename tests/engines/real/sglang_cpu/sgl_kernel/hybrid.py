"""The kernels that Qwen3.5 takes on a CPU, in plain torch; those of its recurrence are named alone."""

import torch
from torch import Tensor


def _norm(x: Tensor, weight: Tensor, eps: float, dim: int) -> Tensor:
    rows = x.reshape(-1, dim).float()
    return (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight.float())).to(x.dtype)


def sigmoid_mul(x: Tensor, gate: Tensor) -> None:
    x.mul_(gate.sigmoid())


def qk_norm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, dim: int
) -> tuple[Tensor, Tensor]:
    return _norm(q, q_weight, eps, dim), _norm(k, k_weight, eps, dim)


def gated_qk_norm(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, dim: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, gate = q_gate.reshape(-1, heads, 2 * dim).chunk(2, -1)
    return _norm(q, q_weight, eps, dim), _norm(k, k_weight, eps, dim), gate.reshape(-1, dim).contiguous()


def unpack(
    qkvz: Tensor, ba: Tensor, keys: int, values: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mixed, z = qkvz.split([qkvz.shape[1] - values * value_dim, values * value_dim], 1)
    b, a = ba.chunk(2, 1)
    return mixed.contiguous(), z.reshape(-1, values, value_dim).contiguous(), b.contiguous(), a.contiguous()


_QK = "Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int dim"
_SIZES = "int keys, int values, int key_dim, int value_dim"
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _schema, _run in (
    ("fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()", sigmoid_mul),
    (f"fused_qk_gemma_rmsnorm_cpu({_QK}) -> (Tensor, Tensor)", qk_norm),
    (f"fused_qk_gemma_rmsnorm_with_gate_cpu({_QK}, int heads) -> (Tensor, Tensor, Tensor)", gated_qk_norm),
    (
        f"fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor qkvz, Tensor ba, {_SIZES})"
        " -> (Tensor, Tensor, Tensor, Tensor)",
        unpack,
    ),
):
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _run, "CPU")
for _name in ("fused_gdn_gating", "fused_sigmoid_gating_delta_rule_update", "chunk_gated_delta_rule"):
    _library.define(f"{_name}_cpu(Tensor a) -> Tensor")
