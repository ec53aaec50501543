"""The output layer by chunks: what is found, and the gradients, do not depend on where the cuts are."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lorad.rl.loss import TokenLogprobs
from lorad.trainers import head_rows
from lorad.trainers.sharded.head import Differentiating, Head, RowLoss, ScoringVisit
from tests.kit.warm.processes import CLIENT as WARM

ROOT = Path(__file__).parents[2]
TOKENS, WORDS, HIDDEN = 90, 301, 16
DTYPES = {"float32": (torch.float32, 1e-6), "bfloat16": (torch.bfloat16, 1e-2)}


class Weighed(RowLoss):
    """A loss of log-probabilities and entropies; `ahead`: of the mean of all log-probabilities too."""

    temperature, has_bonus = 0.8, True

    def __init__(self, *, ahead: bool = False) -> None:
        self.weights, self.looks_ahead, self.mean = torch.linspace(-1, 2, TOKENS), ahead, torch.ones(())

    def settle(self, logprobs: Tensor) -> None:
        self.mean = logprobs.mean()

    def of(self, likely: TokenLogprobs, tokens: slice) -> Tensor:
        weights = self.weights[tokens]
        return (weights * likely.logprobs * self.mean).sum() + 0.1 * (weights * likely.entropy).sum()


class Layer:
    """Random states, and a head that is trained itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        self.states = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
        self.linear = nn.Linear(HIDDEN, WORDS, bias=False, dtype=dtype)
        self.targets = torch.randint(WORDS, (TOKENS,))
        self.head = Head(lambda part: self.linear(part), WORDS)

    def visited(self, loss: RowLoss) -> tuple[Tensor, Tensor]:
        """(what was found, the gradient of the states); that of the head is added to its own."""
        visit = Differentiating(self.targets, loss)
        visit(self.states, self.head)
        assert visit.gradient is not None
        return visit.figures, visit.gradient

    def taken(self) -> Tensor:
        """The gradient of the head, in fp32, which then has none."""
        made, self.linear.weight.grad = self.linear.weight.grad, None
        assert made is not None
        return made.float()

    def by_autograd(self, loss: Weighed) -> tuple[Tensor, Tensor]:
        """(log-probabilities, the gradient of the states), of logits that are all there."""
        says = (self.linear(self.states).float() / loss.temperature).log_softmax(-1)
        logprobs = says.gather(-1, self.targets[:, None])[:, 0]
        entropy = -(says.exp() * says).sum(-1)
        loss.settle(logprobs.detach())
        likely = TokenLogprobs(logprobs, entropy, torch.zeros(TOKENS))
        (gradient,) = torch.autograd.grad(loss.of(likely, slice(None)), self.states)
        return logprobs.detach(), gradient


class Largest(TorchDispatchMode):
    """The most numbers in a result of any operation, of backward ones too."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        for made in found if isinstance(found, tuple | list) else [found]:
            self.numbers = max(self.numbers, made.numel() if isinstance(made, Tensor) else 0)
        return found


@pytest.fixture(params=[1, 7, 89, 90])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(head_rows, "LOGITS", 1)
    monkeypatch.setattr(head_rows, "ROWS", request.param)
    return int(request.param)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunked_gradients_are_those_of_autograd(dtype: str) -> None:
    kind, bound = DTYPES[dtype]
    layer, loss = Layer(kind), Weighed(ahead=True)
    found, gradient = layer.visited(loss)
    logprobs, wanted = layer.by_autograd(Weighed(ahead=True))
    torch.testing.assert_close(found[0], logprobs, atol=1e-5, rtol=0)
    assert float((gradient - wanted).norm() / wanted.norm()) < bound


@pytest.mark.usefixtures("rows")
def test_scores_are_those_of_the_gradients() -> None:
    layer = Layer(torch.float32)
    scoring = ScoringVisit(layer.targets, Weighed.temperature)
    scoring(layer.states, layer.head)
    assert torch.equal(scoring.figures, layer.visited(Weighed())[0])


def test_bfloat16_heads_lose_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of chunks are added in fp32 where the loss collects them."""
    layer, total = Layer(torch.bfloat16), torch.zeros(WORDS, HIDDEN)
    layer.visited(Weighed())
    whole = layer.taken()

    class Collecting(Weighed):
        def collect(self) -> None:
            total.add_(layer.taken())

    monkeypatch.setattr(head_rows, "LOGITS", 1)
    monkeypatch.setattr(head_rows, "ROWS", 1)
    layer.visited(Collecting())
    assert float((total - whole).norm() / whole.norm()) < 5e-3


def test_no_more_than_a_chunk_is_made(rows: int) -> None:
    layer = Layer(torch.float32)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        layer.visited(Weighed(ahead=True))
    assert largest.numbers <= max(rows, HIDDEN) * WORDS


@pytest.mark.system
def test_a_cut_vocabulary_equals_a_whole_one(tmp_path: Path) -> None:
    command = [*WARM, str(ROOT / "tests" / "kit" / "fakes" / "vocabulary_rank.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting")],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
