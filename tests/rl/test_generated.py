"""Rows of reasoning-gym: the same each time, with held-out ones that training never sees."""

import venv
from pathlib import Path

import pytest

from lorad.driver.rewards import Rewarder
from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.rl.data import load_data, load_eval
from lorad.rl.generated import rows
from lorad.rl.reward import RewardInput
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data
from lorad.spec.model import convert
from lorad.spec.reward import RewardSpec

pytestmark = pytest.mark.system

HERE = Path()
WORDS = Data(
    train="reasoning_gym:spell_backward",
    args={"size": 256, "max_word_len": 7},
    prompt_format="R:{metadata.word}=",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    pytest.importorskip("reasoning_gym")
    return Tokenizer(resolve("builtin:tiny"))


def test_rows_are_the_same_each_time(tokenizer: Tokenizer) -> None:
    first = load_data(WORDS.train, "train", WORDS, tokenizer, 0, HERE)
    rows._printed.cache_clear()
    again = load_data(WORDS.train, "train", WORDS, tokenizer, 0, HERE)
    assert first.digest == again.digest and first.take(7, 3) == again.take(7, 3)


def test_held_out_prompts_are_never_trained(tokenizer: Tokenizer) -> None:
    train = load_data(WORDS.train, "train", WORDS, tokenizer, 0, HERE)
    held_out = {example.prompt for example in load_eval(WORDS, tokenizer, 64, HERE)}
    assert held_out and held_out.isdisjoint(example.prompt for example in train.take(0, train.size or 0))


def test_prompts_are_built_of_columns(tokenizer: Tokenizer) -> None:
    example = load_data(WORDS.train, "train", WORDS, tokenizer, 0, HERE).take(0, 1)[0]
    assert example.prompt == f"R:{example.answer[::-1]}="
    missing = Data(train=WORDS.train, args=WORDS.args, prompt_format="{word}")
    with pytest.raises(SpecError, match="prompt_format names 'word', which the row does not have"):
        load_data(WORDS.train, "train", missing, tokenizer, 0, HERE)


def test_the_own_checker_scores(tokenizer: Tokenizer) -> None:
    row = load_data(WORDS.train, "train", WORDS, tokenizer, 0, HERE).take(0, 1)[0].row
    said = [row["answer"], f"It is <answer>{row['answer']}</answer>", "no"]
    with Rewarder([RewardSpec(name="reasoning_gym", workers=1)], HERE) as rewarder:
        scores = rewarder.score([RewardInput("", text, "", "stop", row) for text in said])
    assert [score.value for score in scores[:2]] == [1.0, 1.0] and (scores[2].value or 0.0) < 0.5


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"train": "reasoning_gym:spel_backward"}, "has no task spel_backward"),
        ({"args": {"foo": 1}}, "refuses data.args: .*'foo'"),
        ({"python": "none"}, "none made no rows"),
    ],
)
def test_wrong_sources_are_refused(changed: dict[str, object], says: str, tokenizer: Tokenizer) -> None:
    data = Data(**{name: getattr(WORDS, name) for name in WORDS.__struct_fields__} | changed)
    with pytest.raises(SpecError, match=says):
        load_data(data.train, "train", data, tokenizer, 0, HERE)


def test_an_interpreter_without_the_package_says_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    venv.create(tmp_path, with_pip=False)
    python = str(tmp_path / "bin" / "python")
    data = Data(train=WORDS.train, python=python)
    with pytest.raises(SpecError, match=f"which {python} does not have") as refused:
        load_data(data.train, "train", data, tokenizer, 0, HERE)
    assert "data.python" in refused.value.hint


def test_arguments_without_a_task_are_refused() -> None:
    with pytest.raises(SpecError, match="args and python are for reasoning_gym:TASK"):
        convert({"data": {"train": "sort", "args": {"size": 3}}})
