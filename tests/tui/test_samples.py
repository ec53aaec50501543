"""The samples tab: what the model wrote, step by step, searched, ordered and compared."""

from functools import partial
from typing import Any

import pytest

from lorad.records.samples import Sample
from lorad.tui.new_run.screen import NewRun
from lorad.tui.samples.groups import Group, grouped, hits, ordered
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows
from lorad.tui.widgets.text_view import Reader, folded
from tests.kit.tui_samples import a_sample, a_world, counted, opened, samples_of
from tests.kit.tui_world import User, screen_text, shaped, until, using

HOSTILE = (
    "\x1b[2J\x1b]0;title\x07[bold red]x[/] \u202egnp.exe\u200b\u2066 \ud800 漢字 👩\u200d👩 a\rb\x00\u2028"
)
SHOWN = (
    r"\x1b[2J\x1b]0;title\x07[bold red]x[/] \x202egnp.exe\x200b\x2066 \xd800 漢字 👩\x200d👩 a\x0db\x00\x2028"
)


def head(user: User) -> str:
    return user.app.screen.query_one("#samples-head", Line).said.plain


def text(user: User) -> str:
    return user.app.screen.query_one("#samples-text", Reader).said


def prompts(user: User) -> list[str]:
    return user.app.screen.query_one("#samples-groups", Rows).names


def shows(user: User, words: str) -> bool:
    return words in screen_text(user)


async def test_completions_are_shown_with_reward_and_advantage() -> None:
    async with using(a_world({1: samples_of(1, [0, 1])})) as user:
        await opened(user, 2, "made at 1, sample 3")
        assert prompts(user) == ["p0", "p1"] and "Sort these: 0 3 2" in text(user)
        assert "#2 reward 1.000 ████ advantage +0.500 ····│████ 7 tokens · stop" in text(user)
        assert "#3 reward 0.000 ░░░░ advantage -0.500 ████│····" in text(user)
        assert "logprob -0.375" in text(user) and "@0 · 2 prompts, 8 samples" in head(user)


@pytest.mark.system
async def test_rewards_of_zero_draw_empty_bars() -> None:
    zero = [a_sample(0, index, 1, reward=0.0) for index in range(2)]
    async with using(a_world({1: zero})) as user:
        await opened(user, 2, "made at 1")
        assert text(user).count("reward 0.000 ░░░░") == 2
        table = user.app.screen.query_one("#samples-groups", Rows)
        assert table.cells("p0")["reward"].plain == "░" * 6


QUESTION = (  # of GSM8K, as is its answer
    "Janet’s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for "
    "her friends every day with four. She sells the remainder at the farmers' market daily for $2 per fresh "
    "duck egg. How much in dollars does she make every day at the farmers' market?"
)
ANSWER = (
    "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18 every day at "
    "the farmer’s market.\n#### 18"
)


@pytest.mark.system
async def test_a_long_chat_shows_its_question() -> None:
    before, after = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    )
    samples = [a_sample(0, index, 1, prompt=f"{before}{QUESTION}{after}") for index in range(4)]
    async with using(a_world({1: samples}), (80, 24)) as user:
        await opened(user, 2, "made at 1, sample 0")
        assert "more lines of the prompt: z" in text(user) and "farmers' market?<|im_end|>" in text(user)
        assert "<|im_start|>assistant" not in text(user)
        table = user.app.screen.query_one("#samples-groups", Rows)
        assert table.cells("p0")["prompt"].plain.strip().startswith("…Janet’s ducks")


@pytest.mark.system
async def test_a_long_prompt_leaves_room_for_completions() -> None:
    samples = [a_sample(0, index, 1, prompt=QUESTION, answer=ANSWER) for index in range(4)]
    async with using(a_world({1: samples}), (80, 24)) as user:
        await opened(user, 2, "made at 1, sample 0")
        assert "more lines of the prompt: z" in text(user) and "Janet’s ducks" in text(user)
        assert "#### 18" in screen_text(user) and "farmers' market?" in screen_text(user)
        await user.press("z")
        await until(user, lambda: "muffins for her" in text(user) and "more lines" not in text(user))
        await user.press("z", "slash", *"muffins", "enter")
        await until(user, lambda: "muffins for her" in screen_text(user))


@pytest.mark.system
async def test_keys_go_to_other_steps_and_back() -> None:
    async with using(a_world({step: samples_of(step, [step]) for step in (1, 2, 3)})) as user:
        await opened(user, 2, "made at 3")
        await user.press("less_than_sign", "less_than_sign")
        await until(user, lambda: "made at 1," in text(user) and "step 1 of 3" in head(user))
        await user.press("number_sign", "2", "enter")
        await until(user, lambda: "made at 2," in text(user))
        await user.press("greater_than_sign", "greater_than_sign")
        await until(user, lambda: "made at 3," in text(user) and "● latest" in head(user))


@pytest.mark.system
async def test_latest_step_is_followed_until_one_is_chosen() -> None:
    steps = {step: samples_of(step, [7]) for step in (1, 2, 3)}
    world = a_world(steps)
    world.runs[0]["step"] = 1
    async with using(world) as user:
        await opened(user, 2, "made at 1")
        world.runs[0]["step"] = 2
        world.tell("a", "step")
        await until(user, lambda: "made at 2," in text(user))
        await user.press("number_sign", "2", "enter")
        world.runs[0]["step"] = 3
        world.tell("a", "step")
        await until(user, lambda: "step 2 of 3" in head(user))
        assert "made at 2," in text(user)


@pytest.mark.system
async def test_samples_of_a_step_are_asked_for_once() -> None:
    world, asked = a_world({1: samples_of(1, [0])}), list[dict[str, str]]()
    world.answers["runs/a/samples"] = counted(asked, world.answers["runs/a/samples"])
    async with using(world) as user:
        await opened(user, 2, "made at 1")
        for version in (5, 6, 7):
            world.runs[0]["version"] = version
            world.tell("a", "version")
            await until(user, partial(shows, user, f"version @{version}"))
    assert len(asked) == 1


@pytest.mark.system
async def test_pruned_samples_are_explained() -> None:
    async with using(a_world({2: samples_of(2, [0])})) as user:
        await opened(user, 2, "made at 2")
        await user.press("less_than_sign")
        await until(user, lambda: "No such file" in text(user) and "keep_samples" in text(user))
        await user.press("greater_than_sign")
        await until(user, lambda: "made at 2," in text(user))


@pytest.mark.system
async def test_search_counts_matches_and_n_cycles() -> None:
    async with using(a_world({1: samples_of(1, [0, 1])})) as user:
        await opened(user, 2, "made at 1")
        await user.press("slash", *"SAMPLE", "space", "2", "enter")
        await until(user, lambda: "match 1 of 2" in head(user))
        await user.press("n")
        await until(user, lambda: "match 2 of 2" in head(user) and "Sort these: 1 3 2" in text(user))
        await user.press("n")
        await until(user, lambda: "match 1 of 2" in head(user) and "Sort these: 0 3 2" in text(user))
        await user.press("escape")
        await until(user, lambda: "match" not in head(user))
        await user.press("n")
        await until(user, lambda: any(isinstance(screen, NewRun) for screen in user.app.screen_stack))


@pytest.mark.system
async def test_completions_are_ordered_by_reward_advantage_and_length() -> None:
    async with using(a_world({1: samples_of(1, [0])})) as user:
        await opened(user, 2, "made at 1")
        await user.press("v")
        await until(user, lambda: "by reward" in head(user))
        assert [text(user).index(f"#{place} ") for place in (2, 1, 0, 3)] == sorted(
            text(user).index(f"#{place} ") for place in range(4)
        )


@pytest.mark.system
async def test_comparison_finds_the_same_prompt_earlier() -> None:
    steps = {1: samples_of(1, [5, 6]), 2: samples_of(2, [7, 8]), 3: samples_of(3, [6, 5])}
    async with using(a_world(steps), (160, 40)) as user:
        await opened(user, 2, "made at 3")
        await user.press("d")
        await until(user, lambda: "the same prompt in step 1" in head(user))
        assert any(
            "made at 1, sample 0" in line and "made at 3, sample 0" in line for line in text(user).split("\n")
        )
        await user.press("slash", *"sample", "space", "3", "enter")
        await until(user, lambda: "match 1 of 2" in head(user) and "made at 3, sample 3" in screen_text(user))
        await user.press("w")
        await until(user, lambda: "made at [-1-]{+3+}, sample 0" in text(user))


@pytest.mark.system
async def test_comparison_without_the_prompt_names_its_replacement() -> None:
    async with using(a_world({1: samples_of(1, [5, 6]), 2: samples_of(2, [7, 8])}), (160, 40)) as user:
        await opened(user, 2, "made at 2")
        await user.press("j", "d")
        await until(
            user, lambda: "this prompt is not in steps 1 to 1; prompt 2 of step 1 instead" in head(user)
        )
        assert "Sort these: 6 3 2" in text(user) and "Sort these: 8 3 2" in text(user)
        await user.press("escape")
        await until(user, lambda: "beside" not in head(user) and "Sort these: 6 3 2" not in text(user))


@pytest.mark.system
async def test_hostile_completions_are_shown_inert() -> None:
    world = a_world(
        {1: [a_sample(0, 0, 1, prompt=HOSTILE, completion=HOSTILE, finish=HOSTILE, error=HOSTILE)]}
    )
    async with using(world, (200, 40)) as user:
        await opened(user, 2, SHOWN)
        drawn = screen_text(user)
        assert drawn.count(SHOWN) >= 2 and not set(drawn) & set("\x1b\x07\u202e\u200b\u2066\x00\r\ud800")
        await user.press("slash", *"[bold", "enter", "d", "w")
        await until(user, lambda: "match 1 of 2" in head(user))


OTHERS = [pytest.param(letter, marks=pytest.mark.long) for letter in ("x", "e\u0301", "👩")]


@pytest.mark.parametrize("letter", ["漢", "\u0301", "a b ", *OTHERS])
async def test_megabyte_line_scrolls_to_its_end(letter: str) -> None:
    long = letter * ((1 << 20) // len(letter.encode())) + "END"
    async with using(a_world({1: [a_sample(0, 0, 1, completion=long)]}), (80, 24)) as user:
        await opened(user, 2, "advantage")
        await user.press("enter", "G")
        await until(user, lambda: "END" in screen_text(user))


@pytest.mark.system
async def test_rewards_of_any_size_do_not_break_it() -> None:
    rewards = [1e308, -1e308, 1e308, None, float("nan")]
    huge = [
        a_sample(9, n, 1, reward=reward, advantage=reward, logprobs=[reward])
        for n, reward in enumerate(rewards)
    ]
    async with using(a_world({1: [*huge, a_sample(0, 0, 1)]})) as user:
        await opened(user, 2, "made at 1")
        await user.press("v", "v", "j", "j", "d", "w")
        assert prompts(user) == ["p9", "p0"]


@pytest.mark.system(but=["None", "odd3"])
@pytest.mark.parametrize("odd", [None, 3, {}, {"step": 1, "completion": 3}])
async def test_an_answer_that_holds_no_samples_says_so(odd: Any) -> None:
    async with using(a_world({1: [odd, a_sample(0, 0, 1)]})) as user:
        await opened(user, 2, "an answer is not understood")


@pytest.mark.system
@pytest.mark.parametrize("size", [pytest.param((40, 10), marks=pytest.mark.long), (12, 3)])
async def test_a_small_terminal_shows_what_fits(size: tuple[int, int]) -> None:
    async with using(a_world({1: samples_of(1, [0])})) as user:
        await opened(user, 2, "made at 1")
        await user.resize_terminal(*size)
        await user.press("d", "w", "enter", "G", "escape", "escape")
        await user.resize_terminal(120, 40)
        await until(user, lambda: "made at 1" in screen_text(user))


def test_a_group_that_teaches_nothing_has_no_spread() -> None:
    (group,) = grouped([shaped(Sample, a_sample(0, index, 1, reward=0.5)) for index in range(3)])
    assert (group.mean, group.spread) == (0.5, 0.0)


def test_samples_without_a_value_come_last() -> None:
    rows = [a_sample(0, index, 1, reward=reward) for index, reward in enumerate([0.1, None, 0.9])]
    (group,) = grouped([shaped(Sample, row) for row in rows])
    assert ordered(group.samples, "reward") == [2, 0, 1]


def test_search_ignores_case() -> None:
    groups: list[Group] = grouped(
        [shaped(Sample, a_sample(0, 0, 1, prompt="Straße", completion="a\x1bB ab"))]
    )
    assert [(hit.sample, hit.start, hit.end) for hit in hits(groups, "AB", "as drawn")] == [(0, 7, 9)]
    assert len(hits(groups, "\x1b", "as drawn")) == 1


def test_text_is_folded_at_spaces_or_width() -> None:
    text = "one two three\n\n" + "x" * 12 + " 漢字漢字漢字"
    assert [text[a:b] for a, b in folded(text, 8)] == [
        "one two",
        "three",
        "",
        "x" * 8,
        "xxxx",
        "漢字漢字",
        "漢字",
    ]
