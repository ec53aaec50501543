"""python -m tests.kit.fakes.vocabulary_rank RANK MEETING: half a vocabulary beside a whole one.

Each of two ranks has some of the columns, the second fewer words than columns, and compares what
`token_logprobs` says of its part with what it says of the whole. It ends with an error where they differ.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from lorad.rl.loss import VocabularyPart, token_logprobs

TOKENS, WORDS, COLUMNS = 23, 37, 32
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def told(logits: Tensor, tokens: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """[3, T], and the gradient of the logits."""
    logits = logits.clone().requires_grad_()
    likely = token_logprobs(logits.clone(), tokens, 0.7, entropy_gradient=True, part=part)
    weights = torch.linspace(-1, 1, TOKENS)
    (likely.logprobs @ weights + (likely.entropy * weights.square()).sum()).backward()
    assert logits.grad is not None
    return torch.stack([values.detach().float() for values in likely]), logits.grad


def main(rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    first = rank * COLUMNS
    words = min(COLUMNS, WORDS - first)
    assert dist.group.WORLD is not None
    for dtype, bound in BOUNDS.items():
        torch.manual_seed(0)
        logits, tokens = (4 * torch.randn(TOKENS, WORDS)).to(dtype), torch.randint(WORDS, (TOKENS,))
        mine = torch.full((TOKENS, COLUMNS), 100.0, dtype=dtype)  # more than any word has, in the padding
        mine[:, :words] = logits[:, first : first + words]
        found, gradient = told(mine, tokens, VocabularyPart(first, words, dist.group.WORLD))
        wanted, whole = told(logits, tokens, None)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(gradient[:, :words], whole[:, first : first + words], atol=bound, rtol=0)
        assert not gradient[:, words:].any()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
