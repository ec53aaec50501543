"""The serving screen and its chat, on prepared data."""

import shlex
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from textual.widgets import Input

from lorad.errors import NotFound, SpecError
from lorad.records.requests import Sampling
from lorad.records.versions import ServedAlias
from lorad.text import one_line
from lorad.tui.run.screen import RunScreen
from lorad.tui.screens.dialogs import AskDialog
from lorad.tui.serving.alias_rows import AliasData, alias_row, milliseconds, title
from lorad.tui.serving.chat import MOST, ChatPanel, Question, sampling_of
from lorad.tui.serving.screen import Serving
from lorad.tui.widgets.line import Line
from tests.kit.tui_world import HOSTILE, SHOWN, User, World, a_run, line, screen_text, shaped, until, using

TRAFFIC = {
    "requests": 120,
    "in_flight": 3,
    "failed": 1,
    "tokens": 4000,
    "requests_per_second": 2.0,
    "window": 60.0,
}
TRAFFIC |= {"tokens_per_second": 133.2, "ttft_p50": 0.04, "ttft_p95": 0.2, "p50": 0.84, "p95": 12.53}


def an_alias(name: str, run: str = "sorter", version: int = 6, **more: Any) -> dict[str, Any]:
    who = {"by": "ann", "owner": "ann", "updated_at": time.time() - 4000, "sha256": "ab12" * 16}
    return {
        "alias": name,
        "run": run,
        "version": version,
        "step": version,
        "attested": "passed",
        "traffic": TRAFFIC,
        **who,
        **more,
    }


def a_move(version: int | None, alias: str = "bot") -> dict[str, Any]:
    run = None if version is None else "sorter"
    return {"alias": alias, "run": run, "version": version, "at": time.time() - 60, "by": "ann"}


def a_world(*aliases: dict[str, Any]) -> World:
    world = World(a_run("sorter"))
    world.answers |= {"aliases": list(aliases), "aliases/bot/moves": [a_move(6), a_move(None), a_move(4)]}
    world.answers |= {"pools": [], "devices": [], "POST generate": said}
    return world


def said(body: dict[str, Any]) -> dict[str, Any]:
    """Answer as the daemon answers `generate`."""
    version = "sorter@6" if body["version"] == "bot" else body["version"]
    text = f"{version} says {body['prompt']}"
    return {"version": version, "completions": [{"text": text, "tokens": [1, 2, 3], "finish": "stop"}]}


@asynccontextmanager
async def serving(world: World, size: tuple[int, int] = (160, 50), **options: Any) -> AsyncIterator[User]:
    async with using(world, size, **options) as user:
        await user.press("M")
        await until(user, lambda: isinstance(user.app.screen, Serving) and "Serving" in line(user, "#title"))
        yield user


async def chatting(user: User, prompt: str) -> None:
    """Open a chat with the alias under the cursor and the version before it, and send the prompt."""
    await until(user, lambda: "sorter@4" in line(user, "#log-of-moves"))
    await user.press("c")
    await until(user, lambda: user.app.focused is not None and user.app.focused.id == "prompt")
    await user.press(*prompt, "enter")


def heads(user: User) -> list[str]:
    return [head.said.plain for head in user.app.screen.query(".head").results(Line)]


def asked(world: World) -> list[str]:
    return [body["version"] for path, body in world.bodies if path == "generate"]


async def test_aliases_are_shown_with_version_and_traffic() -> None:
    world = a_world(an_alias("bot"), an_alias("cold", version=4, traffic=None, attested="inconclusive"))
    world.steps = [{"step": 6, "metrics": {"reward": 0.875}}]
    async with serving(world) as user:
        await until(user, lambda: "0.875" in screen_text(user) and "(removed)" in line(user, "#log-of-moves"))
        shown = screen_text(user)
        assert all(
            word in shown for word in ("sorter@6", "sorter@4", "2.00", "840ms", "12.5s", "inconclusive")
        )
        assert line(user, "#title").startswith("Serving  2 aliases · 2.00 req/s · 3 open · 133 tok/s")
        assert "120 requests, 1 failed" in line(user, "#about")


async def test_swap_by_others_appears_by_itself() -> None:
    world = a_world(an_alias("bot"))
    async with serving(world) as user:
        await until(user, lambda: "sorter@6" in screen_text(user))
        world.answers["aliases"] = [an_alias("bot", version=7, traffic=TRAFFIC | {"in_flight": 77})]
        world.tell("sorter", "alias")
        await until(user, lambda: "sorter@7" in screen_text(user) and " 77 " in screen_text(user))


async def test_what_other_runs_do_asks_nothing() -> None:
    calls: list[Any] = []
    world = a_world()

    def told(query: Any) -> list[Any]:
        calls.append(query)
        return [an_alias("bot")]

    world.answers["aliases"] = told
    async with serving(world) as user:
        await until(user, lambda: "sorter@4" in line(user, "#log-of-moves"))
        before, began = len(calls), time.monotonic()
        while time.monotonic() - began < 1.0:
            world.tell("sorter", "step")
            await user.pause(0.05)
        assert len(calls) - before <= 1  # of the tick


@pytest.mark.system
async def test_move_rolls_back_and_remove_ask_as_everywhere() -> None:
    world = a_world(an_alias("bot"))
    world.answers["POST aliases/bot"] = an_alias("bot", version=4) | {
        "previous": "sorter@6",
        "attestation": {"verdict": "passed"},
    }
    async with serving(world) as user:
        await until(user, lambda: "sorter@6" in screen_text(user))
        await user.press("w")
        await until(user, lambda: isinstance(user.app.screen, AskDialog))
        await user.press(*"sorter@4", "enter")
        await until(user, lambda: ("aliases/bot", {"version": "sorter@4", "rollback": False}) in world.bodies)
        await until(user, lambda: "lorad swap bot sorter@4" in line(user, "#status"))
        await user.press("ctrl+d", "enter")
        await user.pause(0.2)
        assert len(world.bodies) == 1  # the answer was no


@pytest.mark.system
async def test_enter_opens_the_run_and_escape_leads_back() -> None:
    async with serving(a_world(an_alias("bot"))) as user:
        await until(user, lambda: "sorter@6" in screen_text(user))
        await user.press("enter")
        await until(user, lambda: isinstance(user.app.screen, RunScreen))
        await user.press("escape")
        await until(user, lambda: isinstance(user.app.screen, Serving))
        await user.press("escape")
        await until(user, lambda: not isinstance(user.app.screen, Serving))


async def test_chat_compares_alias_and_previous_version() -> None:
    world = a_world(an_alias("bot"))
    async with serving(world) as user:
        await chatting(user, "it's 3")
        await until(user, lambda: "sorter@6 says it's 3" in screen_text(user))
        await until(user, lambda: "sorter@4 says it's 3" in screen_text(user))
        assert sorted(asked(world)) == ["bot", "sorter@4"]
        assert heads(user)[0].startswith("bot → sorter@6  3 tok") and heads(user)[1].startswith("sorter@4  3")
        assert """lorad generate bot 'it'"'"'s 3' --temperature 0""" in line(user, "#status")


@pytest.mark.system
async def test_escape_drops_an_awaited_answer() -> None:
    world, answers = a_world(an_alias("bot")), threading.Event()
    world.answers["POST generate"] = lambda body: answers.wait() and said(body)
    async with serving(world) as user:
        await chatting(user, "x")
        await until(user, lambda: heads(user)[0].endswith("1 s"))  # it tells how long
        world.answers["aliases"] = [an_alias("bot", traffic=TRAFFIC | {"in_flight": 77})]
        await until(user, lambda: " 77 " in screen_text(user))
        await user.press("enter")
        await until(user, lambda: "is still coming" in line(user, "#status"))
        await user.press("escape")
        await until(user, lambda: heads(user) == ["bot  dropped", "sorter@4  dropped"])
        answers.set()
        await until(user, lambda: user.app.screen.query_one(ChatPanel).under_way == 0)
        assert heads(user) == ["bot  dropped", "sorter@4  dropped"]
        await user.press("enter")
        await until(user, lambda: "sorter@6 says x" in screen_text(user))
        assert len(asked(world)) == 4
        await user.press("escape")
        await until(user, lambda: not user.app.screen.query_one(ChatPanel).display)


@pytest.mark.system
async def test_dropped_answers_do_not_pile_up() -> None:
    world, answers = a_world(an_alias("bot")), threading.Event()
    world.answers["POST generate"] = lambda body: answers.wait() and said(body)
    async with serving(world) as user:
        await chatting(user, "x")
        for _ in range(MOST):
            await user.press("escape", "c", "enter")
        await until(user, lambda: "were dropped" in line(user, "#status"))
        assert len(asked(world)) <= MOST
        answers.set()


async def test_an_error_stays_in_its_column_in_words() -> None:
    world = a_world(an_alias("bot"))

    def refuse(body: dict[str, Any]) -> dict[str, Any]:
        if body["version"] == "bot":
            raise NotFound("no such thing", hint="Look elsewhere.")
        return said(body)

    world.answers["POST generate"] = refuse
    async with serving(world) as user:
        await chatting(user, "x")
        await until(user, lambda: "no such thing. Look elsewhere." in screen_text(user))
        await until(user, lambda: "sorter@4 says x" in screen_text(user))
        assert heads(user)[0] == "✖ bot"


@pytest.mark.system
async def test_what_a_model_says_is_shown_literally() -> None:
    world = a_world(an_alias("bot", by=HOSTILE))
    world.answers["POST generate"] = {
        "version": "sorter@6",
        "completions": [{"text": f"{HOSTILE}\n[link=x]y[/link]", "tokens": [1], "finish": "[b]stop"}],
    }
    async with serving(world) as user:
        await chatting(user, "x")
        await until(
            user, lambda: screen_text(user).count(SHOWN) >= 2 and "[link=x]y[/link]" in screen_text(user)
        )
        assert "\x1b" not in screen_text(user) and "[b]stop" in heads(user)[0]


@pytest.mark.system
async def test_earlier_prompts_come_back_with_up_and_down() -> None:
    world = a_world(an_alias("bot"))
    async with serving(world) as user:
        await chatting(user, "one")
        await until(user, lambda: "sorter@6 says one" in screen_text(user))
        field = user.app.screen.query_one("#prompt", Input)
        field.value = "two"
        await user.press("enter")
        await until(user, lambda: "sorter@6 says two" in screen_text(user))
        found = []
        for key in ("up", "up", "up", "down", "down"):
            await user.press(key)
            found.append(field.value)
        assert found == ["two", "one", "one", "two", ""]


@pytest.mark.parametrize("readonly", [True, False])
async def test_readonly_asks_no_version(readonly: bool) -> None:
    world = a_world(an_alias("bot"))
    async with serving(world, readonly=readonly) as user:
        await chatting(user, "x")
        wanted = "Read-only" if readonly else "lorad generate bot x"
        await until(user, lambda: wanted in line(user, "#status"))
        assert bool(asked(world)) is not readonly


@pytest.mark.parametrize(
    "typed", [("warm", "64", "0"), ("-1", "64", "0"), ("nan", "64", "0"), ("0", "0", "0"), ("0", "64", "x")]
)
def test_what_is_no_number_is_refused_by_name(typed: tuple[str, str, str]) -> None:
    with pytest.raises(SpecError, match="is not a"):
        sampling_of(*typed)


@pytest.mark.parametrize("prompt", ["it's", "-n 3", "a\nb", "$(rm)"])
def test_the_command_says_the_same_to_a_shell(prompt: str) -> None:
    words = shlex.split(Question("bot", prompt, Sampling(temperature=0.5, max_new_tokens=8, seed=1)).command)
    assert words[:2] == ["lorad", "generate"] and prompt in words and words[words.index("bot") + 1] == prompt
    assert ("--" in words) is prompt.startswith("-")


async def test_home_without_aliases_can_still_chat() -> None:
    world = a_world()
    async with serving(world, (80, 24)) as user:
        await until(user, lambda: "lorad swap ALIAS RUN@N" in screen_text(user))
        await user.press("c")
        user.app.screen.query_one("#left", Input).value = "sorter"
        await user.press(*"hm", "enter")
        await until(user, lambda: "sorter says hm" in screen_text(user))
        assert "lorad generate sorter hm" in line(user, "#status")


@pytest.mark.system
@pytest.mark.parametrize(
    "size", [*(pytest.param(size, marks=pytest.mark.long) for size in ((200, 60), (40, 10))), (12, 3)]
)
async def test_it_fits_any_terminal(size: tuple[int, int]) -> None:
    rows = [an_alias("bot"), an_alias("支持-🤖-" * 9, "a-long-name" * 5, 10**6, step=None, owner="x" * 50)]
    world = a_world(*rows)
    world.runs.append(a_run(rows[1]["run"]))
    async with serving(world) as user:
        await chatting(user, "hello")
        await user.resize_terminal(*size)
        await until(user, lambda: size[1] < 10 or "says" in screen_text(user))
        await user.press("escape", "j", "o", "O", "c", "pagedown", "pageup", "escape")
        await user.resize_terminal(160, 50)
        await until(user, lambda: "a-long-namea" in screen_text(user))


def test_cells_are_sane_whatever_they_hold() -> None:
    row = an_alias("a\nb\x1b", by=None, step=None, attested="", traffic=TRAFFIC | {"p50": None, "p95": 1e9})
    odd = shaped(ServedAlias, row)
    data = AliasData([odd], {"sorter@6": "tiny-1"}, {}, None, [], False)
    cells, values = alias_row(odd, data)
    assert cells["alias"].plain == one_line("a\nb\x1b") and cells["p50"].plain == "-"
    assert values["pool"] == "tiny-1" and cells["attested"].plain == "not yet"
    assert (
        title(data._replace(aliases=[replace(odd, traffic=None)])).plain
        == "Serving  1 alias · no gateway is up"
    )
    assert [milliseconds(seconds) for seconds in (0.0004, 0.84, 3.394, 9.9996, None)] == [
        "0ms",
        "840ms",
        "3.39s",
        "10.0s",
        "-",
    ]
