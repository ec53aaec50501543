"""What is evaluated: problems, how they are sampled, and what scores their completions."""

import contextlib
from pathlib import Path

from msgspec import structs

from lorad.driver.rewards import Rewarder
from lorad.driver.sample import sampling_of
from lorad.driver.session import Problems
from lorad.protocol.batch import Sampling
from lorad.rl.completions.targets import load_held_out
from lorad.rl.data import load_set
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.kept import MAIN, EvalSet
from lorad.spec.model import Rollout, Spec
from lorad.spec.reward import rewards_of


def load_problems(
    spec: Spec, tokenizer: Tokenizer, cwd: Path, rewarder: Rewarder, stack: contextlib.ExitStack
) -> list[Problems]:
    """Return what a run evaluates: its held-out problems, if there are any, and its sets.

    stack: closes what rewards start. Raises SpecError.
    """
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


def sampling(rollout: Rollout, settings: EvalSet, stop_token_ids: tuple[int, ...]) -> Sampling:
    """Return how the completions of a set are sampled."""
    return structs.replace(
        sampling_of(rollout, stop_token_ids, greedy=True),
        max_new_tokens=settings.max_new_tokens or rollout.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p if settings.temperature else 1.0,
        top_k=settings.top_k if settings.temperature else 0,
    )
