"""In CI: SmolLM2 on the builtin trainer and engine is what transformers and PEFT make of it, and learns.

`make prove-llm` has every backend and algorithm. The model is there after `lorad models get smollm2`.
"""

from pathlib import Path

import pytest

from tests.llm import parity
from tests.llm.learning import run_of_additions
from tests.llm.place import smollm2
from tests.llm.prove import CLOSE, faults_of

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(smollm2() is None, reason="lorad models get smollm2 downloads the model"),
]
FEW = "data.prompts_per_step=4"
STEPS = 2  # with a seed whose first samples have some that are right: 0.31 is held out after them


@pytest.fixture(scope="module")
def base() -> Path:
    directory = smollm2()
    assert directory is not None
    return directory


async def test_the_trainer_agrees_with_peft(base: Path, tmp_path: Path) -> None:
    assert faults_of(await parity.of_trainer("builtin", base, tmp_path, chats=1, steps=1)) == []


async def test_the_engine_agrees_with_peft(base: Path, tmp_path: Path) -> None:
    assert faults_of(await parity.of_engine("builtin", base, tmp_path, chats=1, samples=2)) == []


def test_a_chat_model_learns_to_add(base: Path) -> None:
    outcome = run_of_additions(base, "builtin", "builtin", STEPS, FEW, seed=3, every=STEPS, problems=32)
    assert outcome.evals[STEPS] >= outcome.evals[0] + 0.1, outcome
    assert abs(outcome.peft - outcome.evals[STEPS]) <= 1 / 32
    assert outcome.apart[0] < CLOSE and set(outcome.attested) == {"passed"}
