"""An environment as the hub has them, for verifiers 0.1 to 0.3: sums of numbers of two digits."""

import re

import verifiers as vf
from datasets import Dataset


def right(completion, answer, **kwargs) -> float:
    """1.0 where the last number is the sum."""
    return float(re.findall(r"\d+", str(completion[-1]["content"]))[-1:] == [answer])


def words(completion, **kwargs) -> float:
    return float(len(str(completion[-1]["content"]).split()))


def load_environment(smallest: int = 10, largest: int = 99):
    numbers = range(smallest, largest + 1)
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in numbers for b in numbers]
    rubric = vf.Rubric(funcs=[right, words], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
