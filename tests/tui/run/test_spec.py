"""The spec tab: what is shown of a spec, searched, compared with another run's, and copied."""

from typing import Any

import msgspec
import pytest

from lorad.errors import NotFound
from lorad.spec.model import convert
from lorad.spec.text import load_spec
from lorad.tui.new_run.screen import NewRun
from lorad.tui.run.screen import RunScreen
from lorad.tui.run.spec import SpecScroll
from lorad.tui.spec_lines import ADDED, GONE, OTHER, SAME, lines
from tests.kit.tui_world import User, World, a_run, line, screen_text, until, using


def a_world() -> World:
    world = World(a_run("mine"), a_run("other"))
    world.answers["runs/mine"] = shown(
        "mine", trainer={"lr": 3e-5, "schedule": "linear"}, data={"train": "[b]x[/b]"}
    )
    world.answers["runs/other"] = shown("other", trainer={"lr": 1e-4, "steps": 7})
    return world


def shown(name: str, **spec: Any) -> dict[str, Any]:
    attempts = [{"attempt": 1, "changed": {}}, {"attempt": 2, "changed": {"trainer.lr": 3e-5}}]
    more = {
        "spec": msgspec.to_builtins(convert({"name": name, **spec})),
        "attempts": attempts,
        "cwd": "/there",
    }
    return {**a_run(name), **more, "warnings": [], "origin": None}


async def open_tab(user: User) -> None:
    await until(user, lambda: "mine" in screen_text(user))
    await user.press("enter")
    await until(user, lambda: isinstance(user.app.screen, RunScreen))
    await user.press("6")
    await until(user, lambda: "lr: 3e-5" in screen_text(user))


def test_lines_of_two_specs_bear_signs() -> None:
    after, before = (
        {"lora.rank": 8, "seed": 1, "trainer.min_lr": 0.1},
        {"lora.rank": 4, "eval.every": 5, "seed": 1},
    )
    found = {one.key: (one.sign, one.before) for one in lines(after, before)}
    assert found["lora.rank"] == (OTHER, "4") and found["seed"] == (SAME, "")
    assert found["trainer.min_lr"] == (ADDED, "0.0") and found["eval.every"] == (GONE, "")
    assert [one.text for one in lines(after)] == [
        "seed: 1",
        "lora:",
        "  rank: 8",
        "trainer:",
        "  min_lr: 0.1",
    ]


@pytest.mark.system
async def test_defaults_are_hidden_until_asked_for() -> None:
    async with using(a_world(), (160, 50)) as user:
        await open_tab(user)
        assert "min_lr" not in screen_text(user) and "train: " + '"[b]x[/b]"' in screen_text(user)
        assert "Attempt 2 changed: ~ trainer.lr=3e-5" in screen_text(user)
        assert "lorad show mine --json" in line(user, "#status")
        await user.press("a")
        await until(user, lambda: "dropout: 0.0" in screen_text(user))


@pytest.mark.system
async def test_spec_is_compared_with_another_run() -> None:
    async with using(a_world(), (160, 50)) as user:
        await open_tab(user)
        await user.press("d")
        await until(user, lambda: user.app.screen.query_one("#spec-other").suggester is not None)  # type: ignore[attr-defined]
        await user.press("o")
        await until(user, lambda: "other" in screen_text(user))
        await user.press("right", "enter")
        await until(user, lambda: "~   lr: 3e-5   was 0.0001" in screen_text(user))
        assert "+   schedule: linear" in screen_text(user) and "-   steps: 7" in screen_text(user)


@pytest.mark.system
async def test_comparison_with_an_unknown_run_says_so() -> None:
    def nothing(query: dict[str, str]) -> None:
        raise NotFound("no run named ghost", hint="")

    world = a_world()
    world.answers["runs/ghost"] = nothing
    async with using(world, (160, 50)) as user:
        await open_tab(user)
        await user.press("d")
        await until(user, lambda: user.app.screen.query_one("#spec-other").has_focus)
        await user.press(*"ghost", "enter")
        await until(user, lambda: "no run named ghost" in line(user, "#status"))
        assert "lr: 3e-5" in screen_text(user)


@pytest.mark.system
async def test_search_finds_a_key_until_escape() -> None:
    async with using(a_world(), (80, 24)) as user:
        await open_tab(user)
        await user.press("a", "slash", *"amplified", "enter")
        await until(user, lambda: "amplified_every: 10" in screen_text(user))
        await user.press("escape")
        await until(user, lambda: isinstance(user.app.screen.focused, SpecScroll))
        assert isinstance(user.app.screen, RunScreen)


@pytest.mark.system
async def test_the_copied_yaml_is_the_spec() -> None:
    world = a_world()
    async with using(world, (80, 24)) as user:
        await open_tab(user)
        await user.press("Y")
        await until(user, lambda: user.app.clipboard != "")
        assert load_spec(user.app.clipboard) == convert(world.answers["runs/mine"]["spec"])


@pytest.mark.system
async def test_new_run_begins_from_the_shown_spec() -> None:
    async with using(a_world(), (80, 24)) as user:
        await open_tab(user)
        await user.press("L")
        await until(
            user, lambda: isinstance(user.app.screen, NewRun) and "from run mine" in line(user, "#title")
        )


@pytest.mark.system
@pytest.mark.parametrize("size", [pytest.param((40, 10), marks=pytest.mark.long), (12, 3)])
async def test_the_tab_fits_any_terminal(size: tuple[int, int]) -> None:
    async with using(a_world(), (100, 30)) as user:
        await open_tab(user)
        await user.resize_terminal(*size)
        await user.press("a", "G", "slash", "x", "escape", "d", "escape", "g")
        await until(user, lambda: isinstance(user.app.screen.focused, SpecScroll))
