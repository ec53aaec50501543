"""The process of a user's advantage or loss: `python -m lorad.driver.user.algorithm_child LIFELINE`.

JSON lines, with arrays in them: an AlgorithmFunction, answered by Ready; then one
AlgorithmQuestion at a time, answered by AlgorithmAnswer.
LIFELINE is the read end of a pipe whose write end only the driver holds, see `reward_child.py`.
"""

import base64
import sys
from collections.abc import Callable
from typing import Any, Literal

from lorad.startup import quick_imports

with quick_imports():
    import msgspec
    import numpy as np
    from msgspec import Struct

    from lorad.children.user_code import describe, import_function, keywords_of
    from lorad.children.user_serve import Code, serve
    from lorad.errors import LoradError
    from lorad.rl.user.functions import (
        AdvantageInput,
        LossInput,
        as_advantages,
        as_loss,
        check_derivative,
        sample_of,
    )

Kind = Literal["advantage", "loss"]


class AlgorithmFunction(Code):
    """The function of a file, and what it is."""

    kind: Kind = "loss"


class AlgorithmQuestion(Struct):
    """A question to an advantage or a loss.

    checks: the seed of a check of the derivative before the answer; None for no check.
    """

    advantage: AdvantageInput | None = None
    loss: LossInput | None = None
    checks: int | None = None


class AlgorithmAnswer(Struct):
    """What the function returned, or an error.

    value: a loss's own; None where it returned none.
    array: float64, advantages or derivatives.
    is_last: the process is of no further use.
    """

    value: float | None = None
    array: np.ndarray | None = None
    error: str = ""
    hint: str = ""
    is_last: bool = False


def main(lifeline: int) -> None:
    serve(lifeline, AlgorithmFunction, _load, enc_hook=plain_of)


def _load(setup: AlgorithmFunction) -> tuple[Callable[[bytes], AlgorithmAnswer], list[str]]:
    """Return what answers an AlgorithmQuestion, and the keywords that the function requires."""
    function = import_function(setup)
    keywords = keywords_of(function, setup.function)
    offered = list(sample_of(setup.kind, with_reference=False).arguments())
    if missing := [name for name in keywords.required if name not in offered]:
        raise LoradError(
            f"{setup.function} of {setup.file} needs {', '.join(missing)}, which no {setup.kind} is given",
            hint=f"It may name {', '.join(offered)}, and only what it uses of them.",
        )

    if prepare := getattr(function, "lorad_prepare", None):
        prepare()  # here, as its first call has a time limit

    def called(**arguments: Any) -> Any:
        return function(**keywords.chosen(arguments))

    def answer(line: bytes) -> AlgorithmAnswer:
        question = msgspec.json.decode(line, type=AlgorithmQuestion, dec_hook=array_of)
        try:
            if (samples := question.advantage) is not None:
                array = as_advantages(
                    called(**samples.arguments()), samples.rewards.size, samples.sampler.size
                )
                return AlgorithmAnswer(array=array)
            assert question.loss is not None
            if question.checks is not None:
                check_derivative(called, question.loss, question.checks)
            value, derivative = as_loss(called(**question.loss.arguments()), question.loss.logprobs.size)
            return AlgorithmAnswer(value=value, array=derivative)
        except LoradError as error:
            return AlgorithmAnswer(error=f"{setup.function} of {setup.file}: {error}", hint=error.hint)
        except BaseException as error:
            return AlgorithmAnswer(error=describe(error, setup), is_last=isinstance(error, MemoryError))

    return answer, keywords.required


def plain_of(value: Any) -> Any:
    """Return an array as JSON has it."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    raise NotImplementedError(type(value).__name__)


def array_of(kind: type, plain: Any) -> Any:
    """Return the array that `plain_of` wrote. Raises ValueError."""
    if kind is not np.ndarray:
        raise NotImplementedError(kind.__name__)
    dtype, data = plain
    return np.frombuffer(base64.b64decode(data), np.dtype(dtype))


if __name__ == "__main__":
    main(int(sys.argv[1]))
