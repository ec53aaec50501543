"""Gated delta nets in plain torch, for servers on a CPU whose own kernels need AVX-512 or AMX, and bfloat16.

For tests, in the interpreters of servers; never part of lorad. `delta_rows` is the recurrence of Gated Delta
Networks (Yang et al., 2024, arXiv 2412.06464), one token after another.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def delta_rows(
    layer: Any, weight: Tensor, inputs: tuple[Tensor, Tensor, Tensor], tail: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one sequence; return [T, value heads, value dim], and the tail and the memory after it.

    layer: a server's, with A_log, dt_bias and its sizes. weight: [conv dim, kernel], of its convolution.
    inputs: q, k and v before the convolution [T, conv dim], b and a [T, value heads]. tail: what the
    convolution saw last [kernel - 1, conv dim]. memory: fp32 [value heads, key dim, value dim].
    """
    mixed, b, a = inputs
    heads, values, key_dim = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim
    whole = torch.cat([tail.to(mixed.dtype), mixed])
    x = F.conv1d(whole.t()[None].float(), weight[:, None].float(), groups=len(weight))[0].t()
    x = F.silu(x).to(mixed.dtype).float()
    q, k, v = x.split([heads * key_dim, heads * key_dim, x.shape[1] - 2 * heads * key_dim], 1)
    q, k = (part.unflatten(1, (heads, -1)) for part in (q, k))
    q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    q, k = (part.repeat_interleave(values // heads, 1) for part in (q * key_dim**-0.5, k))
    v = v.unflatten(1, (values, -1))
    decay = (-layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())).exp()
    beta = b.float().sigmoid()
    out = torch.empty_like(v)
    for t in range(len(mixed)):
        memory = memory * decay[t][:, None, None]
        new = (v[t] - torch.einsum("hkv,hk->hv", memory, k[t])) * beta[t][:, None]
        memory = memory + k[t][:, :, None] * new[:, None, :]
        out[t] = torch.einsum("hkv,hk->hv", memory, q[t])
    return out, whole[len(mixed) :], memory


def mend_vllm(module: Any) -> None:
    """Replace what vLLM 0.32 computes a layer by; `module` is its `mamba.ops.cpu.gdn_attention`."""
    from vllm.forward_context import get_forward_context

    def core(  # parameters are named as vLLM's operator has them
        mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: module.LayerNameType
    ) -> None:
        context = get_forward_context()
        layer = context.no_compile_layers[module._resolve_layer_name(layer_name)]
        facts = context.attn_metadata and context.attn_metadata[layer.prefix]
        if not facts or not facts.num_actual_tokens:
            return
        tails, memories = module._conv_buffer_view(layer), module._ssm_state_view(layer)
        weight = layer.conv1d.weight.flatten(1)
        starts = facts.non_spec_query_start_loc.tolist()
        slots = facts.non_spec_state_indices_tensor.tolist()
        for n in range(facts.num_decodes + facts.num_prefills):
            is_begun = n < facts.num_decodes or bool(facts.has_initial_state[n])
            rows, slot = slice(starts[n], starts[n + 1]), slots[n]
            inputs = mixed_qkv[rows], b[rows], a[rows]
            made, tail, memory = delta_rows(
                layer, weight, inputs, tails[slot].t() * is_begun, memories[slot].float() * is_begun
            )
            core_attn_out[rows] = made.to(core_attn_out.dtype)
            tails[slot] = tail.t().to(tails.dtype)
            memories[slot] = memory.to(memories.dtype)

    module.cpu_gdn_attention_core = core


def mend_sglang(module: Any) -> None:
    """Replace what SGLang 0.5.23 computes a layer by; `module` is its `linear.gdn_backend`."""

    def run(
        backend: Any, layer: Any, inputs: tuple[Tensor, Tensor, Tensor], lengths: list[int], begun: list[bool]
    ) -> Tensor:
        cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        tails, memories = cache.conv[0], cache.temporal
        shape = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        slots = backend.forward_metadata.mamba_cache_indices.tolist()
        parts = zip(*(part.split(lengths) for part in inputs), strict=True)
        out = []
        for rows, slot, is_begun in zip(parts, slots, begun, strict=False):  # SGLang may pad the slots
            memory = memories[slot].view(shape).float() * is_begun
            tail = tails[slot].t() * is_begun
            made, tail, memory = delta_rows(layer, layer.conv_weights, rows, tail, memory)
            out.append(made)
            tails[slot] = tail.t().to(tails.dtype)
            memories[slot] = memory.view(memories[slot].shape).to(memories.dtype)
        return torch.cat(out)[None].to(inputs[0].dtype)

    def extend(
        backend: Any, layer: Any, forward_batch: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, **_: Any
    ) -> Tensor:
        begun = [length > 0 for length in forward_batch.extend_prefix_lens_cpu]
        return run(backend, layer, (mixed_qkv, b, a), [*forward_batch.extend_seq_lens_cpu], begun)

    def decode(
        backend: Any, layer: Any, forward_batch: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, **_: Any
    ) -> Tensor:
        count = len(mixed_qkv)
        return run(backend, layer, (mixed_qkv, b, a), [1] * count, [True] * count)

    module.GDNAttnBackend.forward_extend = extend
    module.GDNAttnBackend.forward_decode = decode


def mend_sglang_norm(module: Any) -> None:
    """Replace a kernel of Triton's, which has none for CPUs; `module` is SGLang's `fla.layernorm_gated`."""

    def layernorm_fn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        z: Tensor | None = None,
        eps: float = 1e-6,
        **how: Any,
    ) -> Tensor:
        assert bias is None and z is not None and how["norm_before_gate"] and how["is_rms_norm"]
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight.float()
        return (y * F.silu(z.float())).to(x.dtype)

    module.layernorm_fn = layernorm_fn
