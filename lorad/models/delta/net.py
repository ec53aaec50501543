"""A gated delta net between its linears, in the dtype of the base but for the rule and its states."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lorad.models.base import Delta
from lorad.models.config import DeltaConfig
from lorad.models.delta.rule import RuleInputs, by_chunks, by_one
from lorad.models.ops import rms_norm

_EPS = 1e-6  # of the lengths of queries and keys
_CHUNKS = {16: 16, 256: 32}
"""Up to how many tokens which chunks are the quickest on a CPU; of more, those of 64."""


class State(NamedTuple):
    """What rows have left behind: what a net needs of the tokens before."""

    memory: Tensor  # float32 [rows, value heads, key dim, value dim]
    tail: (
        Tensor  # [rows, kernel - 1, mixed]: the last inputs of the convolution, zeros before the first token
    )


class Net(NamedTuple):
    """A layer's net. Its inputs are [rows, time, fed]: queries, keys and values, b and a."""

    sizes: DeltaConfig
    weights: Delta
    eps: float

    @property
    def fed(self) -> int:
        """Return how many numbers of a token enter; the rest of `qkv` gates what leaves."""
        return self.sizes.mixed + 2 * self.sizes.value_heads

    def nothing(self, x: Tensor) -> State:
        """Return the state before the first token of rows."""
        sizes = self.sizes
        shape = len(x), sizes.value_heads, sizes.key_dim, sizes.value_dim
        memory = torch.zeros(shape, device=x.device)
        return State(memory, x.new_zeros(len(x), sizes.kernel - 1, sizes.mixed))

    def run(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """Return [rows, time, value heads, value dim] and the state after the last token of each row.

        lengths: tokens of each row, int64 [rows]; what follows them is padding. None where there is none.
        """
        time = x.shape[1]
        whole = torch.cat([state.tail, x[..., : self.sizes.mixed]], 1)
        mixed = F.conv1d(whole.mT, self.weights.conv[:, None], groups=self.sizes.mixed).mT
        tokens = self._tokens(F.silu(mixed), x)
        tail = whole[:, time:]
        if lengths is not None:
            places = torch.arange(time, device=x.device)
            is_live = (places < lengths[:, None])[:, None]
            tokens = tokens._replace(k=tokens.k * is_live[..., None], g=tokens.g * is_live)
            ends = lengths[:, None] + torch.arange(tail.shape[1], device=x.device)
            tail = whole.gather(1, ends[..., None].expand(tail.shape))
        chunk = next((size for most, size in _CHUNKS.items() if time <= most), 64)
        out, memory = by_chunks(tokens, state.memory, chunk)
        return out.transpose(1, 2).to(x.dtype), State(memory, tail)

    def step(self, x: Tensor, state: State) -> Tensor:
        """Do the same for one token a row, [rows, 1, fed], and change the state in place."""
        window = torch.cat([state.tail, x[..., : self.sizes.mixed]], 1)
        state.tail.copy_(window[:, 1:])
        mixed = (window * self.weights.conv.t()).sum(1, keepdim=True)
        out = by_one(self._tokens(F.silu(mixed), x), state.memory)
        return out.transpose(1, 2).to(x.dtype)

    def _tokens(self, mixed: Tensor, x: Tensor) -> RuleInputs:
        sizes = self.sizes
        keys = sizes.key_heads * sizes.key_dim
        q, k, v = mixed.float().split([keys, keys, sizes.values], -1)
        q, k = (part.unflatten(-1, (sizes.key_heads, -1)).transpose(1, 2) for part in (q, k))
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _EPS) for part in (q, k))
        q = q * sizes.key_dim**-0.5
        if (repeats := sizes.value_heads // sizes.key_heads) > 1:
            q, k = (part.repeat_interleave(repeats, 1) for part in (q, k))
        b, a = x[..., sizes.mixed :].mT.split(sizes.value_heads, 1)
        g = self.weights.decay[:, None] * F.softplus(a.float() + self.weights.shift[:, None])
        values = v.unflatten(-1, (sizes.value_heads, -1)).transpose(1, 2)
        return RuleInputs(q, k, values, g, b.sigmoid().float())

    def gated(self, out: Tensor, z: Tensor) -> Tensor:
        """Return RMSNorm of each head's values times silu(z), [rows, time, values]."""
        gates = F.silu(z.unflatten(-1, out.shape[-2:]).float())
        return (rms_norm(out, self.weights.norm, self.eps) * gates).to(out.dtype).flatten(-2)
