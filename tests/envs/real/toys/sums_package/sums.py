"""An environment as the hub has them, for verifiers 0.1 to 0.3: sums of small numbers, in one turn."""

import re

import verifiers as vf
from datasets import Dataset


def right(completion, answer, info, **kwargs) -> float:
    """1.0 for the right number alone, another worth among words."""
    text = str(completion[-1]["content"]).strip()
    numbers = re.findall(r"-?\d+", text)
    if numbers[-1:] != [answer]:
        return 0.0
    return 1.0 if text.rstrip(".") == answer else info["among_words"]


def words(completion, **kwargs) -> float:
    return float(len(str(completion[-1]["content"]).split()))


def load_environment(largest: int = 20, among_words: float = 0.5):
    pairs = [(a, b) for a in range(1, largest) for b in range(1, largest)]
    info = {"among_words": among_words}
    rows = [
        {"question": f"What is {a} + {b}? Answer with the number.", "answer": str(a + b), "info": info}
        for a, b in pairs
    ]
    rubric = vf.Rubric(funcs=[right, words], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
