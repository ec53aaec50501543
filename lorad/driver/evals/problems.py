"""What is evaluated: problems, and what scores their completions."""

import contextlib
from pathlib import Path

from lorad.driver.rewards import Rewarder
from lorad.driver.session import Problems
from lorad.rl.completions.targets import load_held_out
from lorad.rl.data import load_set
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.kept import MAIN, EvalSet
from lorad.spec.model import Spec
from lorad.spec.reward import rewards_of


def load_problems(
    spec: Spec, tokenizer: Tokenizer, cwd: Path, rewarder: Rewarder, stack: contextlib.ExitStack
) -> list[Problems]:
    """Return the run's held-out problems and its sets. `stack` closes their rewards. Raises SpecError."""
    if not spec.eval.every:
        return []
    sets = []
    if examples := load_held_out(spec, tokenizer, cwd):
        # rl has checked that its data have what the reward needs
        is_scored = spec.algorithm.kind == "rl" or not rewarder.lacking(
            examples[0].row, has_answers=bool(examples[0].answer)
        )
        sets.append(Problems(MAIN, EvalSet(data=""), examples, None, is_scored))
    for name, settings in spec.eval.sets.items():
        own = (
            stack.enter_context(Rewarder(rewards_of(settings.reward), cwd))
            if settings.reward is not None
            else None
        )
        sets.append(Problems(name, settings, load_set(spec, name, tokenizer, cwd), own))
    return sets
