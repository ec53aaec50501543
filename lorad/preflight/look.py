"""Show what a run would read: lengths of the data, and a row as the model gets it."""

from collections.abc import Sequence

import numpy as np

from lorad.protocol.preflight import DataLook, Lengths
from lorad.rl.data import Dataset
from lorad.rl.tokenizer import Tokenizer

_OF_ENDLESS = 256  # problems of a task that are looked at
_CHARACTERS = 20000  # of a text that is shown
_TYPES = {bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "an object"}


def look_at(data: Dataset, tokenizer: Tokenizer) -> DataLook:
    """Measure the data and take the first row of training as it is."""
    (first,) = data.take(0, 1)
    if data.size is None:
        examples = data.take(0, _OF_ENDLESS)
        prompts: Sequence[int] = [len(example.tokens) for example in examples]
        completions: Sequence[int] = [t.tokens.size for example in examples for t in example.targets]
    else:
        prompts = data.prompt_lengths
        completions = data.completion_lengths
    answer = first.answer_value
    kind = type(answer)
    return DataLook(
        looked_at=len(prompts),
        prompts=_lengths(prompts),
        completions=_lengths(completions) if len(completions) else None,
        cut=data.cut,
        prompt=first.prompt[:_CHARACTERS],
        prompt_tokens=len(first.tokens),
        answer=first.answer[:_CHARACTERS],
        answer_type="" if answer is None or isinstance(answer, str) else _TYPES.get(kind, kind.__name__),
        said=[tokenizer.decode(t.tokens.tolist(), skip_special=False)[:_CHARACTERS] for t in first.targets],
    )


def _lengths(tokens: Sequence[int]) -> Lengths:
    return Lengths(int(np.min(tokens)), int(np.median(tokens)), int(np.max(tokens)))
