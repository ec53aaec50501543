"""The gated delta rule (Yang, Kautz & Hatamizadeh, arXiv 2412.06464): a state S of each head decays, is
corrected at each token's key towards its value, and is read at its query, all in float32:

S <- exp(g) S;  S <- S + beta k (v - k S);  o = q S
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class RuleInputs(NamedTuple):
    """What the rule takes of tokens, float32. A token whose k and g are 0 leaves the state as it is."""

    q: Tensor  # [rows, heads, time, key dim]
    k: Tensor
    v: Tensor  # [rows, heads, time, value dim]
    g: Tensor  # [rows, heads, time]: the logarithm of the decay, 0 or less
    beta: Tensor  # [rows, heads, time]


def by_chunks(tokens: RuleInputs, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Return o [rows, heads, time, value dim] and the state after the last token, chunk by chunk: within one,
    the corrections of all tokens are the solution of a triangular system (section 3.3 of the paper).

    state: before the first token, [rows, heads, key dim, value dim].
    """
    rows, heads, time, dim = tokens.q.shape
    more = -time % chunk
    q, k, v = (
        F.pad(part, (0, 0, 0, more)).view(rows, heads, -1, chunk, part.shape[-1]) for part in tokens[:3]
    )
    g, beta = (F.pad(part, (0, more)).view(rows, heads, -1, chunk) for part in tokens[3:])
    total = g
    for bit in range((chunk - 1).bit_length()):  # up to each token: a GPU's cumsum does not repeat its bits
        total = total + F.pad(total[..., : -(1 << bit)], (1 << bit, 0))
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    inner = (q @ k.mT) * decay
    k_beta = k * beta[..., None]
    right = torch.cat([v * beta[..., None], k_beta * total.exp()[..., None]], -1)
    system = (k_beta @ k.mT) * decay  # with ones on its diagonal, whatever is there
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], dim], -1)
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    decays = total[..., -1].exp()[..., None, None]
    outs = []
    for number in range(q.shape[2]):
        corrections = values[:, :, number] - keys[:, :, number] @ state
        outs.append(q[:, :, number] @ state + inner[:, :, number] @ corrections)
        state = state * decays[:, :, number] + k[:, :, number].mT @ corrections
    return torch.cat(outs, 2)[:, :, :time], state


def by_one(tokens: RuleInputs, state: Tensor) -> Tensor:
    """Return o of one token a row, and change the state in place."""
    q, k, v, g, beta = (part[:, :, 0] for part in tokens)
    state.mul_(g.exp()[..., None, None])
    corrections = (v - torch.einsum("rhkv,rhk->rhv", state, k)) * beta[..., None]
    state.addcmul_(k[..., None], corrections[..., None, :])
    return torch.einsum("rhkv,rhk->rhv", state, q)[:, :, None]
