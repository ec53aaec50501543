"""What every engine refuses before it samples."""

from __future__ import annotations

from collections.abc import Sequence

from lorad.protocol.batch import Prompt, Sampling


def check_request(prompts: Sequence[Prompt], sampling: Sampling, vocab_size: int, most: int) -> None:
    """Raise ValueError for a request that cannot be sampled. most: tokens of a prompt and its completion
    together.
    """
    if sampling.max_new_tokens < 1 or not sampling.temperature >= 0 or not 0 < sampling.top_p <= 1:
        raise ValueError(
            f"max_new_tokens >= 1, temperature >= 0 and 0 < top_p <= 1 are needed, not {sampling}"
        )
    if "" in sampling.stop:
        raise ValueError("an empty stop string would end every sample at once")
    for prompt in prompts:
        size = len(prompt.tokens)
        if not size or prompt.tokens.min() < 0 or prompt.tokens.max() >= vocab_size:
            raise ValueError(f"prompt {prompt.id} is empty or has token ids outside 0..{vocab_size - 1}")
        if size + sampling.max_new_tokens > most:
            raise ValueError(
                f"prompt {prompt.id}: {size} tokens and max_new_tokens {sampling.max_new_tokens} exceed "
                f"{most}, the positions of the engine"
            )
