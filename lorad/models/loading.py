"""Tensors from safetensors files into a `Base`. Nothing is ever unpickled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lorad.errors import SpecError
from lorad.models.base import Base, Delta, Experts, Layer, Weight
from lorad.models.config import DeltaConfig, ExpertsConfig, ModelConfig, modules_in, shapes_in
from lorad.models.directory import embeddings_of, read_config
from lorad.models.facts import check_tensors
from lorad.models.ops import prepare
from lorad.models.packed import pack, stacked
from lorad.models.rope import rope_tables
from lorad.protocol.heartbeat import HEART
from lorad.protocol.pool_setup import Quantize

_HEAD = "lm_head.weight"
_MAPPED = 2**26  # bytes of a file that stay mapped: each opening parses the names of all its tensors


def load_base(
    directory: Path, dtype: torch.dtype, device: torch.device, quantize: Quantize | None = None
) -> Base:
    """Read, cast and fuse the weights of a Hugging Face directory, one tensor at a time and straight to the
    device. Linears are rounded to the grid of `quantize`.

    Raises: SpecError for an unknown architecture, a missing file or tensor, a tensor of another shape, and
    one that the forward would leave out.
    """
    config = read_config(directory)
    prepare(device)
    source = _Source(directory, dtype, device, quantize)
    embed = source.take(embeddings_of(config), config.vocab_size, config.hidden_size)
    head = embed if config.tie_word_embeddings else source.take(_HEAD, config.vocab_size, config.hidden_size)
    layers = tuple(_layer(source, config, index) for index in range(config.num_hidden_layers))
    norm = _norm(source, config, f"{config.prefix}norm.weight", config.hidden_size)
    cos, sin = rope_tables(config, dtype, device)
    return Base(config, dtype, device, embed, layers, norm, head, cos, sin)


class _Source:
    """Tensors by name over all shards of a directory, each read once and cast on its way to its place.

    Raises SpecError unless the files are the model of config.json, see `check_tensors`.
    """

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, quantize: Quantize | None
    ) -> None:
        self.directory = directory
        self.dtype = dtype
        self.device = device
        self.quantize = quantize
        self.files = check_tensors(directory, read_config(directory))
        self.rest = set(self.files)
        self._path: Path | None = None
        self._file: Any = None
        self._touched = 0

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self.stack([name], [shape[0]], *shape[1:])

    def stack(
        self, names: Sequence[str], rows: Sequence[int], *columns: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the tensors one above the other, in `dtype` or the dtype of the base, in one allocation: no
        second copy of a weight exists at any time.
        """
        whole = torch.empty(sum(rows), *columns, dtype=dtype or self.dtype, device=self.device)
        for name, part in zip(names, whole.split(list(rows)), strict=True):
            part.copy_(self._mapped(name, tuple(part.shape)))
            HEART.progress()
        return whole

    def linears(self, names: Sequence[str], rows: Sequence[int], *shape: int) -> Weight:
        """Return the weights of linears one above the other, seen as `shape`."""
        if self.quantize is None:
            return self.stack(names, rows, shape[-1]).view(shape)
        parts = []
        for name, count in zip(names, rows, strict=True):
            mapped = self._mapped(name, (count, shape[-1]))
            parts.append(pack(mapped, self.quantize, self.dtype, self.device))
            HEART.progress()
        return stacked(parts, shape)

    def _mapped(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a view of the file, to be copied before the next is asked for."""
        if self._path != self.files[name] or self._touched > _MAPPED:
            self._path = self.files[name]
            self._file = safe_open(self._path, framework="pt")
            self._touched = 0
        tensor: torch.Tensor = self._file.get_tensor(name)
        self._touched += tensor.nbytes
        if tuple(tensor.shape) != shape:
            raise SpecError(f"{self.files[name]} was changed while it was read", hint="start again")
        self.rest.discard(name)
        HEART.tell(f"loading weights {len(self.files) - len(self.rest)} of {len(self.files)}")
        return tensor

    def take_fused(self, name: str, *shape: int) -> torch.Tensor:
        """Return [experts, out, in] of a tensor [experts, in, out], or [experts, out]. Outputs of gate and up
        take turns in the file, and follow each other here.
        """
        mapped = self._mapped(name, shape)
        is_pair = ".gate_up_" in name
        parts = [mapped[..., first::2] for first in range(2)] if is_pair else [mapped]
        parts = [part.mT if len(shape) == 3 else part for part in parts]
        whole = torch.empty(shape[0], shape[-1], *shape[1:-1], dtype=self.dtype, device=self.device)
        for half, part in zip(whole.chunk(len(parts), 1), parts, strict=True):
            half.copy_(part)
        HEART.progress()
        return whole


def _layer(source: _Source, config: ModelConfig, index: int) -> Layer:
    prefix = f"{config.prefix}layers.{index}."
    delta = config.delta if config.has_delta(index) else None
    is_dense = not config.has_experts(index)

    def bias(group: str, is_there: bool) -> torch.Tensor | None:
        names = [f"{prefix}{module}.bias" for module in modules_in(config, index, group)]
        return (
            source.stack(names, [rows for rows, _ in shapes_in(config, index, group)]) if is_there else None
        )

    return Layer(
        input_norm=_norm(source, config, f"{prefix}input_layernorm.weight", config.hidden_size),
        qkv=_linears(source, config, index, "qkv"),
        qkv_bias=bias("qkv", config.qkv_bias),
        qk_norm=_qk_norm(source, config, prefix) if config.qk_norm and delta is None else None,
        o=_linears(source, config, index, "o"),
        o_bias=bias("o", config.o_bias),
        post_norm=_norm(source, config, f"{prefix}post_attention_layernorm.weight", config.hidden_size),
        gate_up=_linears(source, config, index, "gate_up") if is_dense else None,
        gate_up_bias=bias("gate_up", config.mlp_bias and is_dense),
        down=_linears(source, config, index, "down") if is_dense else None,
        down_bias=bias("down", config.mlp_bias and is_dense),
        experts=None
        if is_dense or config.experts is None
        else _experts(source, config, config.experts, index),
        sinks=source.take(f"{prefix}self_attn.sinks", config.num_attention_heads)
        if config.has_sinks
        else None,
        delta=None if delta is None else _delta(source, delta, f"{prefix}linear_attn."),
    )


def _norm(source: _Source, config: ModelConfig, name: str, size: int) -> torch.Tensor:
    """Return what a norm multiplies by, rounded once."""
    if config.delta is None:
        return source.take(name, size)
    return source.stack([name], [size], dtype=torch.float32).add_(1).to(source.dtype)


def _delta(source: _Source, sizes: DeltaConfig, prefix: str) -> Delta:
    decay, shift = (
        source.stack([f"{prefix}{name}"], [sizes.value_heads], dtype=torch.float32)
        for name in ("A_log", "dt_bias")
    )
    order = None
    if sizes.is_interleaved:  # two linears have what belongs to a key head side by side
        numbers = torch.arange(sizes.mixed + sizes.values + 2 * sizes.value_heads)
        qkvz, ba = (part.view(sizes.key_heads, -1) for part in numbers.tensor_split([-2 * sizes.value_heads]))
        own = sizes.values // sizes.key_heads
        q, k, v, z = qkvz.split([sizes.key_dim, sizes.key_dim, own, own], 1)
        order = torch.cat([part.flatten() for part in (q, k, v, *ba.chunk(2, 1), z)])
    return Delta(
        conv=source.take(f"{prefix}conv1d.weight", sizes.mixed, 1, sizes.kernel).squeeze(1),
        decay=-decay.exp(),
        shift=shift,
        norm=source.take(f"{prefix}norm.weight", sizes.value_dim),
        order=None if order is None else order.to(source.device),
    )


def _linears(source: _Source, config: ModelConfig, layer: int, *groups: str, count: int = 0) -> Weight:
    """Return the weights of linears of some groups one above the other: [out, in], or [count, out, in]."""
    modules = [module for group in groups for module in modules_in(config, layer, group)]
    names = [f"{config.prefix}layers.{layer}.{module}.weight" for module in modules]
    shapes = [shape for group in groups for shape in shapes_in(config, layer, group)]
    rows = [rows for rows, _ in shapes]
    inputs = shapes[0][1]
    return source.linears(names, rows, *([count, sum(rows) // count] if count else [sum(rows)]), inputs)


def _experts(source: _Source, config: ModelConfig, experts: ExpertsConfig, layer: int) -> Experts:
    prefix = f"{config.prefix}layers.{layer}."
    count = experts.count
    width = experts.width
    hidden = config.hidden_size
    if experts.is_fused:  # as in gpt-oss: the linears of all experts in two tensors, and biases
        block = f"{prefix}{experts.block}"
        return Experts(
            router=source.take(f"{block}.router.weight", count, hidden),
            gate_up=source.take_fused(f"{block}.experts.gate_up_proj", count, hidden, 2 * width),
            down=source.take_fused(f"{block}.experts.down_proj", count, width, hidden),
            router_bias=source.take(f"{block}.router.bias", count),
            gate_up_bias=source.take_fused(f"{block}.experts.gate_up_proj_bias", count, 2 * width),
            down_bias=source.take_fused(f"{block}.experts.down_proj_bias", count, hidden),
        )

    def stack(linear: str) -> Weight:
        groups = [f"experts.{expert}.{linear}" for expert in range(count)]
        return _linears(source, config, layer, *groups, count=count)

    gate = f"{prefix}{experts.block}.gate"
    shared = experts.shared
    score_bias = [f"{gate}.e_score_correction_bias"]
    return Experts(
        router=source.take(f"{gate}.weight", count, hidden),
        gate_up=stack("gate_up"),
        down=stack("down"),
        bias=source.stack(score_bias, [count], dtype=torch.float32) if experts.is_sigmoid else None,
        shared_gate_up=_linears(source, config, layer, "shared.gate_up") if shared else None,
        shared_down=_linears(source, config, layer, "shared.down") if shared else None,
        shared_gate=source.take(f"{prefix}{shared.name}_gate.weight", 1, hidden)
        if shared and shared.is_gated
        else None,
    )


def _qk_norm(source: _Source, config: ModelConfig, prefix: str) -> torch.Tensor:
    """Return the norms of q, then of k, [heads + kv heads, head_dim]."""
    heads = config.num_attention_heads
    kv = config.num_key_value_heads
    dim = config.head_dim
    names = [f"{prefix}self_attn.{name}.weight" for name in ("q_norm", "k_norm")]
    if config.norms_all_heads:
        return source.stack(names, [heads * dim, kv * dim]).view(-1, dim)
    q, k = (_norm(source, config, name, dim) for name in names)
    return torch.cat([q.expand(heads, -1), k.expand(kv, -1)])
