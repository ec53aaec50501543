"""The process in which a user's reward function runs: `python -m lorad.driver.user.reward_child LIFELINE`.

JSON lines: a Setup, answered by Ready; then one RewardInput at a time, answered by Reply. LIFELINE is the
read end of a pipe whose write end only the driver holds: when the driver is gone, however it went, the kernel
kills this process group. See `lorad/children/user_code.py`.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from lorad.startup import quick_imports

with quick_imports():
    import msgspec
    from msgspec import Struct

    from lorad.children.user_code import Code, describe, import_function, keywords_of, serve
    from lorad.rl.reward import RewardInput, as_reward, builtin


class Setup(Code):
    """A builtin (`name`, `pattern`), or without a name the function of a file."""

    name: str = ""
    pattern: str | None = None


class Reply(Struct):
    """The reward of one sample, or what went wrong. is_last: the process is of no further use."""

    value: float | None = None
    error: str = ""
    seconds: float = 0.0
    is_last: bool = False


def main(lifeline: int) -> None:
    serve(lifeline, Setup, _load)


def _load(setup: Setup) -> tuple[Callable[[bytes], Reply], list[str]]:
    """Return what scores a sample, and the keywords that the function requires."""
    score: Callable[[RewardInput], Any]
    if setup.name:
        score, required = builtin(setup.name, setup.pattern), []
    else:
        function = import_function(setup)
        keywords = keywords_of(function, setup.function)
        required = keywords.required

        def score(sample: RewardInput) -> Any:
            return function(**keywords.chosen(sample.keywords()))

    return lambda line: _run(score, msgspec.json.decode(line, type=RewardInput), setup), required


def _run(score: Callable[[RewardInput], Any], sample: RewardInput, setup: Setup) -> Reply:
    started, is_last = time.monotonic(), False
    try:
        value, error = as_reward(score(sample)), ""
    except BaseException as raised:
        value, error, is_last = None, describe(raised, setup), isinstance(raised, MemoryError)
    return Reply(value=value, error=error, seconds=time.monotonic() - started, is_last=is_last)


if __name__ == "__main__":
    main(int(sys.argv[1]))
