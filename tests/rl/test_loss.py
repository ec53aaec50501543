"""The loss by hand: every expected number is written out as the arithmetic that gives it."""

from math import exp, log
from typing import Literal

import pytest
import torch

from lorad.protocol.batch import LossStats, PolicyLoss
from lorad.rl.loss import (
    TokenLosses,
    TokenTargets,
    kl_estimate,
    loss_stats,
    token_logprobs,
    token_losses,
)


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def losses_of(
    ratios: tuple[float, ...], advantages: tuple[float, ...], loss: PolicyLoss, **more: torch.Tensor
) -> tuple[TokenLosses, torch.Tensor]:
    """(losses, d(sum of losses) / d(logprobs)) where the old policy gave every token probability 0.1."""
    logprobs = torch.tensor([log(0.1 * ratio) for ratio in ratios], requires_grad=True)
    old = torch.full_like(logprobs.detach(), log(0.1))
    targets = TokenTargets(
        **{
            "advantages": values(*advantages),
            "sampler": old,
            "old": old,
            "weights": torch.ones(len(ratios)),
            **more,
        }
    )
    found = token_losses(logprobs, targets, loss)
    torch.autograd.backward(found.loss.sum())
    assert logprobs.grad is not None
    return found, logprobs.grad


def test_a_ratio_inside_the_bounds_is_not_clipped() -> None:
    found, gradient = losses_of((1.1, 0.9), (2.0, -3.0), PolicyLoss())
    assert found.loss.tolist() == pytest.approx([-1.1 * 2.0, -0.9 * -3.0])
    assert gradient.tolist() == pytest.approx([-1.1 * 2.0, -0.9 * -3.0])  # d(ratio) = ratio * d(logprob)
    assert found.clipped.tolist() == [0, 0]


def test_ratio_beyond_the_bounds_has_no_gradient() -> None:
    found, gradient = losses_of((1.5, 0.5), (2.0, -3.0), PolicyLoss(clip_low=0.2, clip_high=0.2))
    assert found.loss.tolist() == pytest.approx([-1.2 * 2.0, -0.8 * -3.0])
    assert gradient.tolist() == [0, 0]
    assert found.clipped.tolist() == [1, 1]


def test_ratio_in_the_wrong_direction_is_unclipped() -> None:
    found, gradient = losses_of((0.5, 1.5), (2.0, -3.0), PolicyLoss())
    assert found.loss.tolist() == pytest.approx([-0.5 * 2.0, -1.5 * -3.0])
    assert gradient.tolist() == pytest.approx([-0.5 * 2.0, -1.5 * -3.0])
    assert found.clipped.tolist() == [0, 0]


def test_the_two_bounds_are_apart() -> None:
    found, _ = losses_of(
        (1.25, 1.35, 0.85, 0.75), (1.0, 1.0, -1.0, -1.0), PolicyLoss(clip_low=0.2, clip_high=0.28)
    )
    assert found.loss.tolist() == pytest.approx([-1.25, -1.28, 0.85, 0.8])


def test_ratio_is_one_without_old_logprobs() -> None:
    logprobs = values(-1.0, -2.0).requires_grad_()
    targets = TokenTargets(values(2.0, -1.0), sampler=values(-1.5, -2.0), weights=torch.ones(2))
    found = token_losses(logprobs, targets, PolicyLoss())
    torch.autograd.backward(found.loss.sum())
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-2.0, 1.0]
    assert found.ratio.tolist() == [1, 1]
    assert found.sampler_difference.tolist() == [0.5, 0.0]


def test_importance_is_truncated_and_weighs_the_surrogate_alone() -> None:
    # the old policy is 1.5 and 4 times as likely as the engine's
    sampler = values(log(0.1 / 1.5), log(0.1 / 4.0))
    loss = PolicyLoss(importance_cap=2.0, kl_coef=0.5, kl_type="k1")
    reference = values(log(0.1) - 0.3, log(0.1) + 0.3)
    found, gradient = losses_of((1.0, 1.0), (1.0, 1.0), loss, sampler=sampler, reference=reference)
    assert found.loss.tolist() == pytest.approx([-1.5 + 0.5 * 0.3, -2.0 - 0.5 * 0.3])
    assert gradient.tolist() == pytest.approx([-1.5 + 0.5, -2.0 + 0.5])


def test_no_cap_means_no_correction() -> None:
    found, _ = losses_of((1.0,), (1.0,), PolicyLoss(), sampler=values(-9.0))
    assert found.loss.tolist() == pytest.approx([-1.0])


@pytest.mark.parametrize(
    ("kind", "estimate", "gradient"),
    [
        ("k1", 0.2, 1.0),
        ("k2", 0.2**2 / 2, 0.2),
        ("k3", exp(-0.2) + 0.2 - 1, 1 - exp(-0.2)),
    ],
)
def test_kl_estimators_and_their_gradients(kind: str, estimate: float, gradient: float) -> None:
    logprobs = values(-1.0).requires_grad_()
    found = kl_estimate(logprobs, values(-1.2), kind)  # type: ignore[arg-type]
    torch.autograd.backward(found)
    assert found.item() == pytest.approx(estimate)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(gradient)


def test_k3_far_below_the_reference_stays_bounded() -> None:
    logprobs = values(-2.9, -3.1, -30.0, -1e4, -1e30, 1e4).requires_grad_()
    found = kl_estimate(logprobs, torch.zeros(6), "k3")
    torch.autograd.backward(found.sum())
    assert logprobs.grad is not None and bool(torch.isfinite(found).all())
    steepest = 1 - exp(3)
    assert logprobs.grad.tolist() == pytest.approx([1 - exp(2.9), *4 * [steepest], 1.0])
    assert found[:3].tolist() == pytest.approx(
        [exp(2.9) - 2.9 - 1, *(exp(3) - 4 - steepest * d for d in (0.1, 27))]
    )


def test_one_outlier_does_not_outweigh_thousand_tokens() -> None:
    advantages, reference = (1.0,) * 1001, torch.full((1001,), log(0.1))
    reference[0] = 80.0 + log(0.1)
    _, gradient = losses_of((1.0,) * 1001, advantages, PolicyLoss(kl_coef=1e-3), reference=reference)
    assert 0.01 < abs(gradient[0] + 1.0) < 0.02 < 1.0
    assert float(gradient.norm()) == pytest.approx(1001**0.5, rel=1e-4)


def test_k3_near_the_reference_is_exact() -> None:
    difference = torch.linspace(-3, 3, 601).requires_grad_()
    plain = torch.linspace(-3, 3, 601).requires_grad_()
    found, expected = kl_estimate(difference, torch.zeros(601), "k3"), torch.exp(-plain) + plain - 1
    torch.autograd.backward([found.sum(), expected.sum()])
    assert torch.equal(found, expected) and torch.equal(difference.grad, plain.grad)  # type: ignore[arg-type]


def test_the_penalty_is_added_token_by_token() -> None:
    reference = values(log(0.1) - 0.2, log(0.1))
    found, _ = losses_of((1.0, 1.0), (1.0, 1.0), PolicyLoss(kl_coef=0.1, kl_type="k2"), reference=reference)
    assert found.loss.tolist() == pytest.approx([-1.0 + 0.1 * 0.02, -1.0])
    assert found.kl.tolist() == pytest.approx([0.02, 0.0], abs=1e-6)


def test_a_reference_without_a_coefficient_is_a_statistic() -> None:
    found, gradient = losses_of((1.0,), (1.0,), PolicyLoss(kl_type="k1"), reference=values(log(0.1) - 0.2))
    assert found.kl.tolist() == pytest.approx([0.2])
    assert (found.loss.item(), gradient.item()) == pytest.approx((-1.0, -1.0))


def test_a_coefficient_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        losses_of((1.0,), (1.0,), PolicyLoss(kl_coef=0.1))


def test_temperature_scales_logprobs_and_entropy() -> None:
    logits = torch.tensor([[2 * log(1.0), 2 * log(3.0)]])  # at temperature 2: odds 1 to 3
    logprobs, entropy, _ = token_logprobs(logits, torch.tensor([1]), temperature=2.0)
    assert logprobs.tolist() == pytest.approx([log(3 / 4)])
    assert entropy.tolist() == pytest.approx([-(1 / 4) * log(1 / 4) - (3 / 4) * log(3 / 4)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_logprobs_is_that_of_autograd(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    logits, tokens = 9 * torch.randn(6, 50, generator=draw), torch.randint(0, 50, (6,), generator=draw)
    temperature, grad = torch.linspace(0.5, 2, 6), torch.randn(6, generator=draw)
    ours, theirs = (logits.to(dtype).requires_grad_() for _ in range(2))
    expected = (theirs.float() / temperature[:, None]).log_softmax(-1)
    entropy = -(expected.exp() * expected).sum(-1)
    expected.gather(-1, tokens[:, None])[:, 0].backward(grad)
    found, found_entropy, _ = token_logprobs(ours * 1, tokens, temperature)
    found.backward(grad)
    torch.testing.assert_close(found_entropy, entropy)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropy_has_the_gradient_of_autograd(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, tokens = torch.randn(3, 7, generator=generator) * 3, torch.tensor([0, 6, 2])
    logits[0, 3] = -1e4  # a probability of exactly 0
    temperature, grads = torch.tensor([0.5, 1.0, 2.0]), torch.randn(2, 3, generator=generator)
    ours, theirs = (logits.to(dtype).requires_grad_() for _ in range(2))
    expected = (theirs.float() / temperature[:, None]).log_softmax(-1)
    entropy = -(expected.exp() * expected).sum(-1)
    torch.autograd.backward([expected.gather(-1, tokens[:, None])[:, 0], entropy], list(grads))
    made = token_logprobs(ours * 1, tokens, temperature, entropy_gradient=True)
    torch.autograd.backward(made[:2], list(grads))
    torch.testing.assert_close(made[1].detach(), entropy.detach())
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_entropy_bonus_is_taken_from_the_loss() -> None:
    loss = PolicyLoss(entropy_coef=0.5)
    logprobs = values(log(0.1), log(0.2)).requires_grad_()
    targets = TokenTargets(advantages=values(1.0, 1.0), weights=values(1.0, 2.0))
    found = token_losses(logprobs, targets, loss, entropy=values(2.0, 3.0))
    assert found.loss.tolist() == pytest.approx([-1 - 0.5 * 2, 2 * (-1 - 0.5 * 3)])
    with pytest.raises(ValueError, match="needs the entropy"):
        token_losses(logprobs, targets, loss)


def test_one_temperature_is_that_of_every_token() -> None:
    logits, tokens = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 3])
    one, each = (token_logprobs(logits.clone(), tokens, t)[0] for t in (0.7, torch.full((3,), 0.7)))
    torch.testing.assert_close(one, each)


def test_logprobs_of_bfloat16_logits_are_fp32() -> None:
    logprobs, entropy, _ = token_logprobs(torch.zeros(1, 3, dtype=torch.bfloat16), torch.tensor([0]), 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert logprobs.item() == pytest.approx(-log(3))


@pytest.mark.parametrize("ratio", ["sequence", "geometric"])
def test_ratios_of_samples_are_asked_for_first(ratio: Literal["sequence", "geometric"]) -> None:
    with pytest.raises(ValueError, match="sequence_ratios"):
        losses_of((1.5, 1.0), (2.0, 1.0), PolicyLoss(ratio=ratio))


def test_statistics_are_sums_and_the_loss_is_normalised() -> None:
    loss = PolicyLoss(kl_type="k1")
    sampler, reference = values(log(0.1) - 0.5, log(0.1) + 0.25), values(log(0.1), log(0.1) - 1)
    found, _ = losses_of((1.5, 1.0), (2.0, 1.0), loss, sampler=sampler, reference=reference)
    stats = loss_stats(found, values(0.5, 0.75), torch.tensor([True, False]), normaliser=4.0)
    assert stats.loss == pytest.approx((-1.2 * 2.0 - 1.0) / 4) and stats.correct == 1
    assert (stats.tokens, stats.entropy, stats.clipped, stats.ratio) == pytest.approx((2, 1.25, 1, 2.5))
    assert stats.kl == pytest.approx(log(1.5) + 1)
    assert (stats.sampler_difference, stats.sampler_difference_max) == pytest.approx((0.75, 0.5))


def test_statistics_of_parts_add_up() -> None:
    found, _ = losses_of((1.5, 1.0), (2.0, 1.0), PolicyLoss(), sampler=values(-2.0, -4.0))
    parts = [TokenLosses(*(field[token : token + 1] for field in found)) for token in range(2)]
    first, second = (loss_stats(part, torch.ones(1), torch.ones(1), 2.0) for part in parts)
    whole = loss_stats(found, torch.ones(2), torch.ones(2), 2.0)
    assert (first + second).correct == 2 and LossStats().correct is None
    assert (first + second).loss == pytest.approx(whole.loss)
    assert (first + second).sampler_difference_max == whole.sampler_difference_max
