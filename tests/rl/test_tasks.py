import pytest

from lorad.errors import SpecError
from lorad.rl.tasks import TASKS, Split, problem, split_of

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def test_a_sort_problem_asks_for_sorted_digits() -> None:
    example = problem("sort", "train", 0, 17)
    word = example.prompt.removeprefix("S:").removesuffix("=")
    assert example.id == "sort/train/0/17"
    assert word.isdigit() and 4 <= len(word) <= 8
    assert example.answer == "".join(sorted(word))


def test_a_reverse_problem_asks_for_the_word_backwards() -> None:
    example = problem("reverse", "test", 3, 0)
    word = example.prompt.removeprefix("R:").removesuffix("=")
    assert word.isalpha() and word.islower() and 4 <= len(word) <= 8
    assert example.answer == word[::-1]


def test_words_have_every_length_from_four_to_eight() -> None:
    lengths = {len(problem("sort", "train", 0, index).answer) for index in range(100)}
    assert lengths == {4, 5, 6, 7, 8}


@pytest.mark.parametrize("task", sorted(TASKS))
def test_index_decides_the_problem(task: str) -> None:
    forwards = [problem(task, "train", 5, index) for index in range(30)]
    backwards = [problem(task, "train", 5, index) for index in reversed(range(30))]
    assert forwards == backwards[::-1]


def test_problems_never_change_between_releases() -> None:
    assert [problem("sort", split, 0, 17).prompt for split in SPLITS] == [
        "S:25860=",
        "S:45748518=",
        "S:32256=",
    ]
    assert [problem("reverse", split, 0, 17).prompt for split in SPLITS] == [
        "R:egjrbbob=",
        "R:ukxcqm=",
        "R:fkqt=",
    ]


def test_another_seed_gives_other_problems() -> None:
    prompts = [{problem("sort", "train", seed, index).prompt for index in range(50)} for seed in (0, 1)]
    assert len(prompts[0] & prompts[1]) < 5


@pytest.mark.parametrize("task", sorted(TASKS))
def test_no_prompt_is_in_two_splits(task: str) -> None:
    train, validation, test = (
        {problem(task, split, 0, index).prompt for index in range(500)} for split in SPLITS
    )
    assert not train & validation and not train & test and not validation & test


def test_held_out_splits_are_a_sixteenth_each() -> None:
    splits = [split_of(f"S:{number:05d}=") for number in range(100_000)]
    assert splits.count("test") == pytest.approx(100_000 / 16, rel=0.05)
    assert splits.count("validation") == pytest.approx(100_000 / 16, rel=0.05)


def test_unknown_task_is_refused_with_known_ones() -> None:
    with pytest.raises(SpecError) as caught:
        problem("sorting", "train", 0, 0)
    assert "sorting" in str(caught.value) and "reverse, sort" in caught.value.hint


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(SpecError, match="dev"):
        problem("sort", "dev", 0, 0)  # type: ignore[arg-type]
