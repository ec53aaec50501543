"""A calculator as a tool, for problems in words: `env.name: calculator.py:Calculator`, by TRL's contract for
`environment_factory`.

`python examples/calculator.py [DIR]` writes train.jsonl and test.jsonl with problems made up after those of
GSM8K, whose numbers are too large to do in the head. The rows of `gsm8k.py` fit as well.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEFAULT = "~/data/calculator"  # where calculator.yaml looks
HOW = "Use the calculator, then submit the number."
_WHO, _WHAT = ("Tom", "Ann", "Bob", "Eva"), ("apples", "pens", "coins", "books")
_LONGEST = 100  # characters of an expression
_LARGEST = 1e15
_DOES: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


class Calculator:
    """An episode: the model may calculate, and what it submits last is its answer."""

    def reset(self, answer: str, **row: Any) -> None:
        self._wanted = float(answer.replace(",", ""))
        self._submitted: float | None = None

    def calculate(self, expression: str) -> str:
        """Calculate an arithmetic expression.

        Args:
            expression: numbers, + - * / and parentheses, such as (12 + 30) * 4
        """
        if len(expression) > _LONGEST:
            raise ValueError(f"an expression has at most {_LONGEST} characters")
        found = _value(ast.parse(expression, mode="eval").body)
        if abs(found) > _LARGEST:
            raise ValueError("the number is too large")
        return f"{found:.10g}"

    def submit(self, number: float) -> str:
        """Submit the answer.

        Args:
            number: the answer to the problem
        """
        self._submitted = number
        return "submitted"

    def get_reward(self) -> float:
        return float(self._submitted is not None and abs(self._submitted - self._wanted) < 1e-6)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _DOES:
            return _DOES[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=inner) if type(op) in _DOES:
            return _DOES[type(op)](_value(inner))
    raise ValueError("only numbers, + - * / and parentheses")


def rows(count: int, seed: int) -> Iterator[dict[str, str]]:
    """The same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        who, what = rng.choice(_WHO), rng.choice(_WHAT)
        a, b, c = rng.randrange(100, 1000), rng.randrange(12, 100), rng.randrange(10, 100)
        question = f"{who} has {a} {what}, buys {b} boxes of {c} {what} and gives half of all away."
        a += (a + b * c) % 2
        question = question.replace(question.split()[2], str(a), 1)
        yield {"prompt": f"{question} How many {what} are left? {HOW}", "answer": str((a + b * c) // 2)}


def main(directory: str = DEFAULT) -> None:
    path = Path(directory).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    test = [*rows(256, 1)]
    there = {row["prompt"] for row in test}
    train = [row for row in rows(4096, 0) if row["prompt"] not in there]
    for name, some in (("train", train), ("test", test)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


if __name__ == "__main__":
    main(*sys.argv[1:])
