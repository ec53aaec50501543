"""Samples that are chosen, ordered and cut down by the daemon."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorad.client.choice import Choice, in_order
from lorad.client.client import Client
from lorad.errors import NotFound, SpecError
from tests.kit.frozen.world import frozen

__all__ = ["frozen"]


@dataclass(frozen=True)
class One:
    """A sample, as far as it is chosen by."""

    reward: float | None = 0.0
    size: int = 10
    ending: str = "done"
    error: str | None = None
    turn_count: int = 1
    advantage: float | None = None
    searched: list[str] = field(default_factory=lambda: ["Tom reads", "Straße"])


def takes(where: str, **more: object) -> bool:
    return Choice(where).test()(One(**more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "more", "is_taken"),
    [
        ("end:done", {}, True),
        ("!end:done", {}, False),
        ("end:truncated", {"ending": "length"}, True),
        ("truncated", {"ending": "stop"}, False),
        ("reward>0", {}, False),
        ("reward>=0 reward<0.5", {}, True),
        ("reward<=0", {"reward": None}, False),
        ("length>10", {}, False),
        ("turns=3", {"turn_count": 3}, True),
        ("failed", {"error": "judge is down"}, True),
        ("failed", {}, False),
        ('"tom READS" strasse', {}, True),
        ("tom !straße", {}, False),
    ],
)
def test_words_of_where_choose_samples(where: str, more: dict[str, object], is_taken: bool) -> None:
    assert takes(where, **more) is is_taken


@given(st.text(alphabet='end:reward<>=!"0.5 \x1b', max_size=30))
def test_whatever_is_typed_is_read_or_refused(where: str) -> None:
    try:
        takes(where)
    except SpecError as error:
        assert error.hint


def test_samples_without_a_value_come_last() -> None:
    some = [One(reward) for reward in (0.5, None, 1.0)]
    rewards = [[one.reward for one in in_order(some, Choice("", "reward", back))] for back in (False, True)]
    assert rewards == [[1.0, 0.5, None], [0.5, 1.0, None]]


@pytest.mark.system
def test_limit_counts_what_was_chosen(frozen: Client) -> None:
    longest = frozen.samples("one-answer", limit=2, choice=Choice("end:truncated", "length"))
    assert [(one.index, one.ending) for one in longest] == [(2, "length")] * 2
    failed = frozen.samples("one-answer", choice=Choice("failed"))
    assert [one.prompt_id for one in failed] == ["agent/0", "agent/1"]


def test_prompt_is_read_by_number_or_id(frozen: Client) -> None:
    by_number = frozen.samples("one-answer", problem=2)
    assert by_number == frozen.samples("one-answer", prompt_id="agent/1") and len(by_number) == 4
    with pytest.raises(NotFound, match="no prompt 3") as refused:
        frozen.samples("one-answer", problem=3)
    assert "from 1 to 2" in refused.value.hint


def test_held_out_problem_is_read_everywhere(frozen: Client) -> None:
    found = frozen.samples("one-answer", eval="hard", problem=2)
    assert [one.step for one in found] == list(range(10, 81, 10))
    assert {one.prompt_id for one in found} == {"hard/2"}
    wrong = frozen.samples("one-answer", eval="hard", problem=2, choice=Choice("reward<1"))
    assert [one.step for one in wrong] == list(range(10, 71, 10))


def test_brief_samples_keep_length_and_mean(frozen: Client) -> None:
    whole, brief = (frozen.samples("sorter", limit=3, brief=is_brief) for is_brief in (False, True))
    assert all(one.tokens and one.logprobs for one in whole)
    assert not any(one.tokens or one.logprobs for one in brief)
    assert [one.size for one in brief] == [len(one.tokens) for one in whole]
    means = [sum(filter(None, one.logprobs)) / len(one.logprobs) for one in whole]
    assert [one.logprob for one in brief] == pytest.approx(means)


def test_an_unknown_word_is_refused(frozen: Client) -> None:
    with pytest.raises(SpecError, match="reward>x has no number"):
        frozen.samples("one-answer", choice=Choice("reward>x"))
