"""The frozen base model in memory: fused weights that nobody writes to, and a checksum
to see that nobody did.

On a CPU the checksum is of their bytes. A GPU's weights are not copied to the host for it, which would take
seconds in which other runs wait: sums are made on the device, of integers, so that no order changes them.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lorad.models.config import ModelConfig
from lorad.models.packed import Packed

if TYPE_CHECKING:
    from hashlib import _Hash

Weight = torch.Tensor | Packed  # of a linear, or of those of all experts
_CHUNK = 1 << 22  # numbers that are widened at once
_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64))  # as int64


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts. Linear weights are [experts, out, in], and [out, in] in the MLP that all tokens
    share.
    """

    router: torch.Tensor  # [experts, hidden]
    gate_up: Weight  # [experts, 2 * width, hidden]
    down: Weight  # [experts, hidden, width]
    bias: torch.Tensor | None = None  # float32 [experts]: added to scores where they are compared
    shared_gate_up: Weight | None = None  # [2 * shared width, hidden]
    shared_down: Weight | None = None  # [hidden, shared width]
    shared_gate: torch.Tensor | None = None  # [1, hidden]
    router_bias: torch.Tensor | None = None  # [experts]
    gate_up_bias: torch.Tensor | None = None  # [experts, 2 * width]
    down_bias: torch.Tensor | None = None  # [experts, hidden]


@dataclass(frozen=True, slots=True)
class Delta:
    """A gated delta net, between its linears."""

    conv: torch.Tensor  # [queries, keys and values of all heads, kernel]
    decay: torch.Tensor  # float32 [value heads]: the logarithm of what is left of a state, before its gate
    shift: torch.Tensor  # float32 [value heads]: what is added to that gate
    norm: torch.Tensor  # [value dim]
    # int64 [outputs of `qkv`]: in which order they are queries, keys, values, b, a and z; None where they are
    order: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Linear weights are [out, in]; a group's are stacked on out.

    Its mixer is attention or a gated delta net, whose first linears are in `qkv` and whose last is `o`. It
    has an MLP (gate_up and down) or experts.
    """

    input_norm: torch.Tensor  # [hidden]
    qkv: Weight  # [(heads + 2 kv) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [heads + kv, head_dim]: q_norm and k_norm, repeated per head
    o: Weight  # [hidden, heads * head_dim]
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor  # [hidden]
    gate_up: Weight | None  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: Weight | None  # [hidden, intermediate]
    down_bias: torch.Tensor | None
    experts: Experts | None = None
    sinks: torch.Tensor | None = None  # [heads]: a score that each head has beside those of keys
    delta: Delta | None = None


@dataclass(frozen=True, slots=True)
class Base:
    """A base model on one device. No tensor in it requires grad and none is ever written to."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embed: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]; the same tensor as `embed` when tied
    cos: torch.Tensor  # [max positions, rotated]: all of head_dim, or its first numbers
    sin: torch.Tensor  # [max positions, rotated], the first half negated (see `ops.Rope`)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight once, under a stable name, in a stable order; the codes of a packed weight come
        before its scales.
        """
        for name, weight in self._weights():
            if isinstance(weight, Packed):
                yield f"{name}.{weight.form}", weight.codes
                yield f"{name}.scales", weight.scales
            else:
                yield name, weight

    def _weights(self) -> Iterator[tuple[str, Weight]]:
        yield "embed", self.embed
        for index, layer in enumerate(self.layers):
            for field in Layer.__dataclass_fields__:
                part = getattr(layer, field)
                if isinstance(part, Experts | Delta):
                    for name in part.__dataclass_fields__:
                        if (inner := getattr(part, name)) is not None:
                            yield f"layers.{index}.{field}.{name}", inner
                elif part is not None:
                    yield f"layers.{index}.{field}", part
        yield "norm", self.norm
        if self.head is not self.embed:
            yield "head", self.head

    def checksum(self) -> str:
        """Return the sha256 over the names and numbers of every weight; it is equal before and after any
        work, or the base was changed.
        """
        digest = hashlib.sha256()
        for name, tensor in self.weights():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            add_to(digest, tensor)
        return digest.hexdigest()

    @property
    def is_packed(self) -> bool:
        """Whether linears are in the bits of a narrow format."""
        return any(isinstance(weight, Packed) for _, weight in self._weights())

    def nbytes(self) -> int:
        """Return the bytes of all weights."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.weights())


def add_to(digest: "_Hash", tensor: torch.Tensor) -> None:
    """Add the numbers of a tensor to a digest, bit for bit: on a CPU the bytes.

    A GPU's weights are not copied to the host for it, which would take seconds in which other runs wait: sums
    are made on the device, of integers, so that no order changes them.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        digest.update(flat.numpy().data)
        return
    for number in sums(flat):
        digest.update(number.to_bytes(8, "little", signed=True))


def sums(flat: torch.Tensor) -> list[int]:
    """Return two weighted sums of bytes (uint8 [n]) and their number; the sums are of integers modulo 2^64.

    Whatever changes a byte or moves it changes them, but for a chance of about 2^-64.
    """
    count = flat.numel()
    if flat.storage_offset() % 8:  # in a larger tensor: words have to begin at a multiple of their size
        flat = flat.clone()
    whole = count // 8 * 8
    words = flat[:whole].view(torch.int64)
    rest = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    rest[: count - whole] = flat[whole:]
    totals = torch.zeros(2, dtype=torch.int64, device=flat.device)
    parts = [*words.split(_CHUNK), rest.view(torch.int64)]
    begin = 0
    for part in parts:
        place = torch.arange(begin + 1, begin + 1 + len(part), device=flat.device)
        begin += len(part)
        for which, odd in enumerate(_ODD):
            mixed = (part ^ (part >> 29)) * odd + place * _ODD[1 - which]
            totals[which] += ((mixed ^ (mixed >> 32)) * odd).sum()
    return [*totals.tolist(), count]
