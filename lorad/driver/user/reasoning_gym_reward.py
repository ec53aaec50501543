"""The builtin reward `reasoning_gym`. It runs as a file of the user's does, where the package is."""

import json
import sys
from functools import lru_cache
from typing import Any

from lorad.errors import LoradError

try:
    from reasoning_gym import create_dataset  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from reasoning_gym.utils import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        extract_answer,
    )
except ImportError:
    raise LoradError(
        f"the reward reasoning_gym needs reasoning-gym, which {sys.executable} does not have",
        hint=f"`{sys.executable} -m pip install reasoning-gym` installs it; or name an "
        "interpreter that has it in reward.python.",
    ) from None


def score(completion: str, reasoning_gym: dict[str, Any]) -> float:
    """Return the score of the task's own checker, 0 to 1, for the text between <answer> tags, or else for the
    whole completion.

    reasoning_gym: the column by which a row says where it is from.
    """
    dataset = _dataset(reasoning_gym["task"], json.dumps(reasoning_gym["args"], sort_keys=True))
    answer = extract_answer(completion) or completion.strip()
    return float(dataset.score_answer(answer, dataset[reasoning_gym["index"]]))


@lru_cache(maxsize=8)
def _dataset(task: str, args: str) -> Any:
    return create_dataset(task, **json.loads(args))
