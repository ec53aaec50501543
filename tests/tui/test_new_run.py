"""The screen of a new run, by keys alone."""

import threading
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from lorad.errors import SpecError
from lorad.spec.model import Spec
from lorad.spec.templates import TEMPLATES
from lorad.spec.text import load_spec
from lorad.tui.new_run.choice import ChoiceField
from lorad.tui.new_run.pick import Pick
from lorad.tui.new_run.screen import NewRun
from lorad.tui.run.screen import RunScreen
from lorad.tui.screens.dialogs import AskDialog, Confirm
from lorad.tui.screens.help import Help
from tests.kit.tui_world import User, World, a_run, line, screen_text, until, using
from tests.tui.test_form import a_spec


def a_world() -> World:
    world = World(a_run("old", state="ended", reason="completed"))
    shown = {
        **a_run("old"),
        "spec": a_spec(name="old", trainer={"lr": 3e-5}),
        "cwd": "/there",
        "warnings": [],
    }
    world.answers["runs/old"] = shown
    world.answers["runs/new"] = {**shown, **a_run("new")}
    world.answers["POST runs"] = lambda body: a_run("new", state="queued")
    return world


async def begin(user: User, *typed: str) -> NewRun:
    """`n`, and what the form is to begin with."""
    await until(user, lambda: "old" in screen_text(user))
    await user.press("n")
    await until(user, lambda: isinstance(user.app.screen, Pick) and "run      old" in screen_text(user))
    await user.press(*typed, "enter")
    await until(user, lambda: isinstance(user.app.screen, NewRun) and "from" in line(user, "#title"))
    screen = user.app.screen
    assert isinstance(screen, NewRun)
    return screen


@pytest.mark.system
async def test_a_run_is_started_by_keys_alone() -> None:
    world = a_world()
    async with using(world, (80, 24)) as user:
        await begin(user)
        await user.press(*"new", *["down"] * 4, *"64")
        await until(user, lambda: "lorad run run.yaml name=new lora.rank=64" in line(user, "#status"))
        await user.press("ctrl+s")
        await until(user, lambda: isinstance(user.app.screen, RunScreen))
    path, body = world.bodies[-1]
    assert path == "runs" and body["overrides"] == [] and body["name"] is None
    expected = load_spec(TEMPLATES["small"].filled(), overrides=["name=new", "lora.rank=64"])
    assert load_spec(body["spec"]) == expected


@pytest.mark.system
async def test_help_opens_from_the_form_and_its_fields() -> None:
    async with using(a_world(), (80, 24)) as user:
        form = await begin(user)
        assert "f1 Help" in screen_text(user).splitlines()[-1]
        await user.press("question_mark", "f1")
        await until(user, lambda: "A new run" in screen_text(user) and "form.start" in screen_text(user))
        await user.press("escape")
        await until(user, lambda: user.app.screen is form)
        assert form.query(Input).first().value == "?"
        form.query(ChoiceField).first().focus()
        await until(user, lambda: "? Help" in screen_text(user).splitlines()[-1])
        await user.press("question_mark")
        await until(user, lambda: isinstance(user.app.screen, Help))


@pytest.mark.system
async def test_copied_run_begins_in_the_same_directory() -> None:
    world = a_world()
    async with using(world, (160, 50)) as user:
        await begin(user, *"old")
        await until(user, lambda: "lr: 3e-5" in screen_text(user) and "/there" in line(user, "#title"))
        await user.press("ctrl+s")
        await until(user, lambda: world.bodies)
    assert (
        world.bodies[-1][1]["cwd"] == "/there" and load_spec(world.bodies[-1][1]["spec"]).trainer.lr == 3e-5
    )


@pytest.mark.system
async def test_wrong_value_is_marked_and_starts_nothing() -> None:
    world = a_world()
    async with using(world, (80, 24)) as user:
        await begin(user)
        await user.press(*["down"] * 4, *"no", "ctrl+s")
        await until(
            user, lambda: "✖ rank" in screen_text(user) and "lora.rank: Expected int" in line(user, "#says")
        )
        await user.press("1", "up", "down", *"8")
        await until(user, lambda: "✖" not in screen_text(user))
    assert world.bodies == []


@pytest.mark.system
async def test_the_form_says_how_far_the_check_is() -> None:
    released, world = threading.Event(), a_world()

    def refuse(body: dict[str, Any]) -> dict[str, Any]:
        released.wait(60)
        raise SpecError("there is no file /x", key="data", hint="Look there.")

    world.doing = "reading sft.jsonl 41 of 87 MB"
    world.answers["POST runs"] = refuse
    async with using(world, (80, 24)) as user:
        await begin(user)
        await user.press(*"new", "ctrl+s")
        await until(user, lambda: "reading sft.jsonl 41 of 87 MB" in line(user, "#says"))
        released.set()
        await until(user, lambda: "no file /x" in line(user, "#says"))


@pytest.mark.system
async def test_refusal_by_the_daemon_keeps_the_form() -> None:
    def refuse(body: dict[str, Any]) -> dict[str, Any]:
        raise SpecError("there is no file /x", key="data", hint="Look there.")

    world = a_world()
    world.answers["POST runs"] = refuse
    async with using(world, (80, 24)) as user:
        screen = await begin(user)
        await user.press(*"new", "ctrl+s")
        await until(
            user, lambda: "no file /x. Look there." in line(user, "#says") and "✖ train" in screen_text(user)
        )
        assert user.app.screen is screen and "name=new" in screen.command


async def test_prefix_matches_are_offered_first() -> None:
    world = a_world()
    world.runs.append(a_run("lea"))
    async with using(world) as user:
        await until(user, lambda: "lea" in screen_text(user))
        await user.press("n", *"lea")
        await until(user, lambda: "run      lea" in screen_text(user))
        assert screen_text(user).index("run      lea") < screen_text(user).index("template small")


@pytest.mark.system
async def test_readonly_starts_nothing() -> None:
    world = a_world()
    async with using(world, readonly=True) as user:
        await begin(user)
        await user.press("ctrl+s")
        await until(user, lambda: "Read-only" in line(user, "#says"))
    assert world.bodies == []


@pytest.mark.system
async def test_leaving_a_changed_form_asks_first() -> None:
    async with using(a_world()) as user:
        screen = await begin(user)
        await user.press("x", "escape")
        await until(user, lambda: isinstance(user.app.screen, Confirm))
        await user.press("enter")
        await until(user, lambda: user.app.screen is screen)
        await user.press("escape", "y")
        await until(user, lambda: len(user.app.screen_stack) == 1)


def written(directory: Path) -> Spec:
    return load_spec((directory / "run.yaml").read_text())


@pytest.mark.system
async def test_form_can_be_written_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with using(a_world()) as user:
        screen = await begin(user)
        await user.press(*"new", "ctrl+o")
        await until(user, lambda: isinstance(user.app.screen, AskDialog))
        await user.press("ctrl+s")
        await until(
            user, lambda: user.app.screen is screen and line(user, "#status").endswith("$ lorad run run.yaml")
        )
        assert written(tmp_path).name == "new"
        await user.press("2", "ctrl+o")
        await until(user, lambda: isinstance(user.app.screen, AskDialog))
        await user.press("ctrl+s")
        await until(user, lambda: "is lost" in screen_text(user))
        await user.press("enter")
        await until(user, lambda: user.app.screen is screen)
        assert written(tmp_path).name == "new"


@pytest.mark.system
async def test_a_file_is_chosen_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "its").mkdir()
    (tmp_path / "its" / "my.yaml").write_text("lora: {rank: 3}\nreward: rewards.py:f\n")
    monkeypatch.chdir(tmp_path)
    world = a_world()
    async with using(world, (160, 50)) as user:
        await begin(user, *"its/my.yaml")
        await until(user, lambda: "lorad run its/my.yaml" in line(user, "#status"))
        await user.press("ctrl+s")
        await until(user, lambda: world.bodies)
    assert world.bodies[-1][1]["cwd"] == str(tmp_path / "its")


@pytest.mark.system
@pytest.mark.parametrize("size", [pytest.param((40, 10), marks=pytest.mark.long), (12, 3)])
async def test_form_fits_any_terminal(size: tuple[int, int]) -> None:
    async with using(a_world(), (100, 30)) as user:
        screen = await begin(user)
        await user.resize_terminal(*size)
        await user.press("down", "down", "right", "ctrl+t")
        await until(user, lambda: screen.panes.has_class("-flip"))
        await user.press("down", "ctrl+t", "7")
        await until(user, lambda: screen.focused is not None and screen.focused.is_attached)


@pytest.mark.system
async def test_hostile_text_of_a_spec_is_escaped() -> None:
    world = a_world()
    world.answers["runs/old"]["spec"]["data"]["train"] = "[red]x[/] \x1b[31m"
    async with using(world, (160, 50)) as user:
        await begin(user, *"old")
        await until(user, lambda: r'train: "[red]x[/] \u001b[31m"' in screen_text(user))
        assert "\x1b" not in screen_text(user)
