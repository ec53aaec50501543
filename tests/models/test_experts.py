"""A mixture of experts: what autograd makes of one written plainly, whoever else is in the batch."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lorad.models.base import Experts
from lorad.models.config import ExpertsConfig
from lorad.models.experts import mixture

HIDDEN, WIDTH, COUNT = 16, 12, 5


def made(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Experts, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype) * 0.5

    experts = Experts(
        numbers(COUNT, HIDDEN), numbers(COUNT, 2 * WIDTH, HIDDEN), numbers(COUNT, HIDDEN, WIDTH)
    )
    return experts, numbers(23, HIDDEN)


def plain(x: Tensor, experts: Experts, config: ExpertsConfig) -> Tensor:
    """Every expert for every token, those that it is not sent to with weight 0."""
    weights, index = (x @ experts.router.T).softmax(-1).topk(config.per_token)
    if config.is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    share = torch.zeros(len(x), COUNT).scatter(1, index, weights)
    gate, up = torch.einsum("ti,eoi->teo", x, experts.gate_up).chunk(2, -1)
    out = torch.einsum("tew,ehw->teh", F.silu(gate) * up, experts.down)
    return torch.einsum("te,teh->th", share, out)


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("per_token", [1, 2, COUNT])
def test_values_and_gradients_are_those_of_autograd(per_token: int, is_normalized: bool) -> None:
    (experts, x), config = made(), ExpertsConfig(COUNT, per_token, WIDTH, is_normalized)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    value, expected = mixture(ours, experts, config), plain(theirs, experts, config)
    assert torch.allclose(value, expected, atol=1e-6)
    along = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
    value.backward(along)
    expected.backward(along)
    assert ours.grad is not None and theirs.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(mixture(x, experts, config), value)  # sampling computes what training does


def test_experts_nobody_is_sent_to_change_nothing() -> None:
    experts, x = made()
    config = ExpertsConfig(COUNT, 1, WIDTH, False)
    one = x[:1]
    chosen = int((one @ experts.router.T).argmax())
    others = torch.arange(COUNT) != chosen
    experts.gate_up[others], experts.down[others] = float("nan"), float("nan")
    assert mixture(one, experts, config).isfinite().all()


def test_tokens_are_computed_alike_in_any_order() -> None:
    (experts, x), config = made(), ExpertsConfig(COUNT, 2, WIDTH, True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    assert torch.allclose(mixture(x[order], experts, config), mixture(x, experts, config)[order], atol=1e-6)


def test_bfloat16_is_weighted_in_bfloat16() -> None:
    (experts, x), config = made(dtype=torch.bfloat16), ExpertsConfig(COUNT, 2, WIDTH, True)
    value = mixture(x, experts, config)
    assert value.dtype == torch.bfloat16
    wide = Experts(experts.router.float(), experts.gate_up.float(), experts.down.float())
    assert F.cosine_similarity(value.float(), plain(x.float(), wide, config)).mean() > 0.999
