"""The plain path that lorad's learning curves are compared with: GRPO as one would write it first.

transformers' generate samples from the PEFT model that is being trained, every sample's prompt is computed
again, all samples are padded to one length, torch differentiates the loss, AdamW steps. Nothing is shared,
packed or skipped.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.kit.peers import lora, padded
from benchmarks.kit.workload import (
    EOS,
    GROUP,
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    PROMPTS,
    TINY,
    exact_match,
    problems_of,
)
from lorad.rl.tasks import Problem

CLIP, EPSILON = 0.2, 1e-4
PAD = 0


class Plain:
    """GRPO on the tiny base with PEFT."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(zlib.crc32(f"plain {seed}".encode()))
        self.tokenizer = AutoTokenizer.from_pretrained(TINY)
        self.model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), lora())
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, LEARNING_RATE, weight_decay=0.0)

    def step(self, number: int) -> float:
        """One optimizer step; the mean reward of its samples."""
        problems = [problem for problem in problems_of(number) for _ in range(GROUP)]
        ids, mask, completions = self.generate(problems, do_sample=True, top_k=0)
        rewards = torch.tensor(self.score(problems, completions))
        groups = rewards.view(PROMPTS, GROUP)
        centred = groups - groups.mean(1, keepdim=True)
        advantages = (centred / (groups.std(1, keepdim=True) + EPSILON)).flatten()
        self.loss(ids, mask, completions, advantages).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(rewards.mean())

    def greedy(self, problems: Sequence[Problem]) -> float:
        """Exact match on held-out problems."""
        _, _, completions = self.generate(problems, do_sample=False)
        return sum(self.score(problems, completions)) / len(problems)

    def generate(self, problems: Sequence[Problem], **how: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(prompts, their mask, completions), padded; a completion holds PAD after its EOS."""
        ids, mask = padded([self.tokenizer(problem.prompt)["input_ids"] for problem in problems])
        self.model.eval()
        output = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, **how)
        self.model.train()
        return ids, mask, output[:, ids.shape[1] :]

    def score(self, problems: Sequence[Problem], completions: Tensor) -> list[float]:
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        return exact_match(texts, [problem.answer for problem in problems])

    def loss(self, ids: Tensor, mask: Tensor, completions: Tensor, advantages: Tensor) -> Tensor:
        """The clipped loss on policy, the mean over all completion tokens."""
        live = (completions == EOS).cumsum(1) - (completions == EOS).long() == 0
        logits = self.model(
            input_ids=torch.cat([ids, completions], 1), attention_mask=torch.cat([mask, live.long()], 1)
        ).logits[:, ids.shape[1] - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).gather(2, completions[..., None])[..., 0]
        ratio = torch.exp(logprobs - logprobs.detach())
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        losses = -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        return (losses * live).sum() / live.sum()
