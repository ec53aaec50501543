"""The samples tab: transcripts of episodes, filters over a step, evaluations, another run, and how texts are
shown."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.style import Style

from lorad.client.transport import Json
from lorad.records.episodes import EpisodeTurn, ToolCall
from lorad.records.measured import Evaluation
from lorad.records.samples import Sample
from lorad.tui.samples.groups import grouped
from lorad.tui.samples.look import Look, chances
from lorad.tui.samples.parts import text_and_parts
from lorad.tui.widgets.table import Rows
from lorad.tui.widgets.text_view import Reader, TextBlock
from tests.kit.tui_samples import a_sample, a_world, opened, samples_of
from tests.kit.tui_world import User, World, a_run, line, screen_text, shaped, until, using

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
EPISODE = {
    "turns": [
        {"text": f"I add.\n{CALL}", "finish": "stop", "tokens": 9, "observation": "\nit is \x1b[2J 2\n"}
        | {"observed": 3, "calls": [{"name": "add", "arguments": {"a": 1}, "written": CALL}]},
        {"text": "So **two**.", "finish": "stop", "tokens": 4, "observation": "in short: two", "reward": 0.5},
        {"text": "2 <|im_end|>", "finish": "stop", "tokens": 2, "row": 1},
    ],
    "end": "done",
    "rows": 2,
}


def reader(user: User) -> Reader:
    return user.app.screen.query_one("#samples-text", Reader)


def table(user: User) -> Rows:
    """Return the table that is in front."""
    return next(rows for rows in user.app.screen.query(Rows) if rows.id != "runs" and rows.display)


def style_of(user: User, words: str) -> Style:
    """Return how these words are drawn, which are the first of a part of a line."""
    text = reader(user)
    for y in range(text.size.height):
        for part in text.render_line(y):
            if part.text.startswith(words):
                return part.style or Style()
    raise AssertionError(f"no {words} in\n{text.said}")


def says(user: User, words: str) -> bool:
    return words in screen_text(user)


async def typed(user: User, key: str, words: str) -> None:
    letters = ("space" if letter == " " else letter for letter in words)
    await user.press(key, *letters, "enter")


@pytest.mark.system
async def test_transcript_of_an_episode_unfolds() -> None:
    world = a_world({1: [a_sample(0, 0, 1, **EPISODE), a_sample(0, 1, 1)]})
    async with using(world, (160, 48)) as user:
        await opened(user, 2, "── turn 3 ──")
        assert (table(user).cells("p0")["turns"].plain, table(user).cells("p0")["end"].plain) == (
            "2.0",
            "1×done 1×stop",
        )
        assert "▸ calls add(a=1)  z" in reader(user).said and CALL not in reader(user).said
        assert "⑂ row 2 begins: the history was replaced by\nin short: two" in reader(user).said
        assert "3 turns · 15 tokens · done · 2 rows" in reader(user).said
        assert style_of(user, r"it is \x1b[2J 2").dim and not style_of(user, "I add.").dim
        await user.press("z")
        await until(user, lambda: CALL in reader(user).said and "▸ calls" not in reader(user).said)


@pytest.mark.system
async def test_filter_chooses_among_all_samples() -> None:
    rows = [*samples_of(1, [0, 1]), a_sample(2, 0, 1, finish="length", reward=None, error="judge is down")]
    async with using(a_world({1: rows}), (200, 40)) as user:
        await opened(user, 2, "3 prompts, 9 samples")
        await typed(user, "f", "reward>x")
        await until(user, lambda: "reward>x has no number" in line(user, "#status"))
        await user.press("escape")
        await typed(user, "f", "reward>0.5 length<6")
        await until(user, lambda: says(user, "1 prompts, 1 of 9 samples") and says(user, "sample 0"))
        assert line(user, "#status") == "$ lorad samples a --where 'reward>0.5 length<6'"
        await user.press("e")
        await until(user, lambda: says(user, "Which samples?"))
        await user.press(*"failed", "enter")
        await until(user, lambda: says(user, "1 prompts, 1 of 9 samples") and says(user, "judge is down"))
        await user.press("e")
        await until(user, lambda: says(user, "Which samples?") and says(user, "length 5"))
        await user.press(*"length", "equals_sign", "enter")
        await until(user, lambda: line(user, "#status").startswith("$ lorad samples a --where length="))
        await typed(user, "f", "turns>7")
        await until(user, lambda: says(user, "No sample of this step is such: turns>7"))
        await user.press("escape")
        await until(user, lambda: says(user, "3 prompts, 9 samples"))


@pytest.mark.system
async def test_all_samples_are_ordered_together() -> None:
    async with using(a_world({1: samples_of(1, [0, 1])}), (200, 40)) as user:
        await opened(user, 2, "2 prompts, 8 samples")
        await user.press("j", "a")
        await until(user, lambda: len(table(user).names) == 8 and table(user).key == "0 p1")
        assert "sample 0" in reader(user).said and "sample 1" not in reader(user).said
        await user.press("o", "O", "g")
        await until(user, lambda: table(user).by == "reward" and "reward 1.000" in reader(user).said)
        rewards = [float(table(user).cells(name)["reward"].plain) for name in table(user).on_page]
        assert rewards == sorted(rewards, reverse=True)
        await until(user, lambda: line(user, "#status") == "$ lorad samples a --sort reward")
        await typed(user, "slash", "sample 3")
        await until(user, lambda: says(user, "match 1 of 2") and table(user).key == "3 p0")
        await user.press("a")
        await until(user, lambda: table(user).key == "p0")


def evaluated() -> World:
    """A world with an evaluation at 0, 10 and 20, of which 10 was deleted."""
    world = a_world({20: samples_of(20, [7])})
    world.runs[0]["spec"] = {"eval": {"sets": {"hard": {"data": "hard.jsonl"}}}}
    evals = [{"step": step, "problems": 2, "sets": {"hard": {"score": 0, "problems": 2, "failed": 0}}}
             for step in (0, 10, 20)]  # fmt: skip
    assert [shaped(Evaluation, one).step for one in evals] == [0, 10, 20]
    training, answer = world.answers["runs/a/samples"], dict[str, Any]()
    for step in (0, 20):
        answer[str(step)] = [
            a_sample(n, 0, step, set="hard", problem=n + 1, completion=f"eval of {n} at {step}")
            for n in (0, 1)
        ]

    def samples(query: Json) -> Any:
        if "eval" not in query:
            return training(query)
        if "problem" in query:
            return [
                one for rows in answer.values() for one in rows if str(one["problem"]) == query["problem"]
            ]
        return answer.get(query["step"], [])

    world.answers |= {"runs/a/evals": evals, "runs/a/samples": samples}
    return world


@pytest.mark.system
async def test_held_out_prompt_is_followed() -> None:
    async with using(evaluated(), (160, 40)) as user:
        await opened(user, 2, "made at 20")
        await user.press("t")
        await until(user, lambda: says(user, "Samples of what?"))
        await user.press(*"hard", "enter")
        await until(user, lambda: says(user, "eval hard step 20") and says(user, "eval of 0 at 20"))
        await user.press("j", "less_than_sign")
        await until(user, lambda: says(user, "Step 10 has no samples"))
        await user.press("less_than_sign")
        await until(user, lambda: says(user, "eval of 1 at 0") and says(user, "step 0 of 20"))
        assert line(user, "#status") == "$ lorad samples a --eval hard --step 0"
        await user.press("h")
        await until(user, lambda: says(user, "eval of 1 at 20") and says(user, "eval of 1 at 0"))
        await until(user, lambda: line(user, "#status") == "$ lorad samples a --eval hard --prompt 2")
        await user.press("h", "d")
        await until(user, lambda: says(user, "beside: the same prompt in step 20"))


@pytest.mark.system
async def test_samples_of_another_run_stand_beside() -> None:
    world = a_world({3: samples_of(3, [0, 1])})
    world.runs.append(a_run("other", step=2))
    by_id = [a_sample(9, 0, 2, prompt_id="p0"), a_sample(0, 0, 2, prompt_id="x", completion="theirs")]
    world.answers["runs/other/samples"] = lambda query: by_id if query["step"] == "2" else []
    async with using(world, (200, 40)) as user:
        await opened(user, 2, "made at 3")
        await user.press("b")
        await until(user, lambda: says(user, "Beside the samples of which run?"))
        await user.press("enter")
        await until(user, lambda: says(user, "beside: the same prompt in step 2 of other"))
        assert "theirs" in reader(user).said and "other step 2 #0" in reader(user).said
        command = "lorad samples a --step 3 --prompt 1; lorad samples other --step 2 --prompt 2"
        await until(user, lambda: line(user, "#status") == f"$ {command}")
        await user.press("j")
        await until(user, lambda: says(user, "this prompt is not in steps 2 to 2 of other"))


@pytest.mark.system
async def test_texts_are_shown_as_wanted() -> None:
    text = "a\tb <|im_end|>\n# Title\nsome **strong** words"
    tokens = {"widths": [4, 10, 22], "logprobs": [-5.0, -0.01, -0.5], "tokens": [1, 2, 3]}
    async with using(a_world({1: [a_sample(0, 0, 1, completion=text, **tokens)]}), (120, 40)) as user:
        await opened(user, 2, "a  b <|im_end|>")
        await user.press("i")
        await until(user, lambda: "a→ b·<|im_end|>⏎\n#·Title⏎" in reader(user).said)
        assert style_of(user, "<|im_end|>").reverse
        await user.press("i", "c")
        await until(user, lambda: says(user, "probability:") and style_of(user, "a  b").underline)
        assert style_of(user, "<|im_end|>").color is None or not style_of(user, "<|im_end|>").underline
        await user.press("m")
        await until(user, lambda: says(user, "some strong words") and not says(user, "**"))
        assert style_of(user, "strong").bold
        await typed(user, "slash", "WORDS")
        await until(user, lambda: style_of(user, "words").underline)


HOSTILE = st.lists(st.sampled_from("a\t\n\x1b漢\u202e<"), max_size=9).map("".join)


@given(st.lists(st.tuples(HOSTILE, HOSTILE), min_size=1, max_size=4))
def test_parts_lie_in_the_text_in_order(said: list[tuple[str, str]]) -> None:
    turns = [
        EpisodeTurn(text, "stop", 1, observation=answer, calls=(ToolCall("f", None, written=text[:2]),))
        for text, answer in said
    ]
    text, parts = text_and_parts(Sample(1, turns=turns, end="done"))
    places = [place for part in parts for place in (part.start, part.end)]
    assert places == sorted(places) and (not places or places[-1] <= len(text))
    assert all(letter in "\n\u2003" or letter.isprintable() for letter in text)


@given(st.lists(st.sampled_from(["", "a", "\t", "\x1b漢", "bc"]), max_size=6))
def test_colours_of_tokens_cover_what_is_shown(pieces: list[str]) -> None:
    size, text = len(pieces), "".join(pieces)
    row = Sample(1, completion=text, tokens=[0] * size, logprobs=[-3.0] * size, widths=[*map(len, pieces)])
    (group,) = grouped([row])
    spans = chances(row, group.samples[0])
    assert "".join(group.samples[0].completion[a:b] for a, b, _ in spans) == group.samples[0].completion


def test_markdown_keeps_html_and_line_ends() -> None:
    made = Look(markdown=True).block(TextBlock("<think>\nfirst\n</think>\n\n**2** <b>x</b>")).made
    assert made is not None
    lines = [line.rstrip() for line in made(40)[0].split("\n")]
    assert lines == ["<think>", "first", "</think>", "", "2 <b>x</b>"]


@given(st.text(alphabet="a *_#`[]()>-|\n1.<&\\", max_size=40), st.integers(8, 60))
def test_any_markdown_is_rendered_within_the_width(text: str, width: int) -> None:
    made = Look(markdown=True).block(TextBlock(text)).made
    assert made is not None
    shown, spans = made(width)
    assert all(len(line) <= width for line in shown.split("\n"))
    assert all(0 <= first <= last <= len(shown) for first, last, _ in spans)
