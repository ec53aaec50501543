"""What transformers answers: the judge of what a model has learnt."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.llm.place import Addition, prompt_tokens, tokenizer

NEW_TOKENS = 16  # that an answer of the example may have


def greedy(model: torch.nn.Module, base: Path, of: Sequence[Addition]) -> list[str]:
    """Return what transformers' generate answers; prompts are padded on the left."""
    prompts = {"input_ids": [prompt_tokens(base, addition).tolist() for addition in of]}
    padded = tokenizer(base).pad(prompts, return_tensors="pt")
    with torch.no_grad():
        made = model.generate(**padded, max_new_tokens=NEW_TOKENS, do_sample=False)  # type: ignore[operator]
    tails = made[:, padded["input_ids"].shape[1] :]
    return list(tokenizer(base).batch_decode(tails, skip_special_tokens=True))
