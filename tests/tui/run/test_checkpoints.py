"""The checkpoints tab: where a run can be resumed, and how to ask for it."""

import time

import pytest
from msgspec.structs import replace

from lorad.client.client import Client
from lorad.client.transport import Json
from lorad.records.runs import RunDetails
from lorad.records.versions import Checkpoint
from lorad.tui.feed import Changes
from lorad.tui.run.checkpoints import CheckpointsTab
from lorad.tui.screens.dialogs import AskDialog
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows
from tests.kit.tui_samples import counted, opened
from tests.kit.tui_world import Prepared, User, World, a_run, screen_text, shaped, until, using

NOW = time.time()


def a_checkpoint(step: int) -> Json:
    files = {
        "path": f"/runs/a/checkpoints/{step:06d}",
        "bytes": 3 << 20,
        "created_at": NOW - 60 * (40 - step),
    }
    return {"run": "a", "step": step, "attempt": 1, "version": step + 1, **files}


def a_world(*steps: int) -> World:
    world = World(a_run("a", step=max(steps, default=0) + 2))
    world.answers["runs/a/checkpoints"] = lambda query: [a_checkpoint(step) for step in steps]
    return world


def names(user: User) -> list[str]:
    return user.app.screen.query_one("#checkpoints-rows", Rows).names


async def test_checkpoints_are_newest_first_with_lost_steps() -> None:
    async with using(a_world(10, 20)) as user:
        await opened(user, 4, "● newest, whole")
        assert names(user) == ["20.1", "10.1"]
        shown = screen_text(user)
        assert "2 steps" in shown and "12 steps" in shown and "@21" in shown and "3.0 MiB" in shown
        assert (
            "2 whole checkpoints, 6.0 MiB" in user.app.screen.query_one("#checkpoints-head", Line).said.plain
        )


@pytest.mark.system
async def test_resume_starts_from_the_selected_checkpoint() -> None:
    async with using(a_world(10, 20)) as user:
        await opened(user, 4, "● newest, whole")
        await user.press("j", "r")
        await until(user, lambda: isinstance(user.app.screen, AskDialog))
        await until(user, lambda: "lorad resume a --detach --from 10" in screen_text(user))


@pytest.mark.system
async def test_fork_takes_the_version_of_the_checkpoint() -> None:
    async with using(a_world(10, 20)) as user:
        await opened(user, 4, "● newest, whole")
        await user.press("j", "f")
        await until(
            user, lambda: isinstance(user.app.screen, AskDialog) and "lorad fork a@11" in screen_text(user)
        )


def test_checkpoints_are_fetched_only_after_new_ones() -> None:
    world, asked = a_world(10), list[Json]()
    found = [shaped(Checkpoint, a_checkpoint(10))]
    world.answers["runs/a/checkpoints"] = counted(asked, lambda query: [a_checkpoint(10)])
    tab, client, run = (
        CheckpointsTab("a"),
        Client(transport=Prepared(world)),
        shaped(RunDetails, a_run("a", step=12)),
    )
    later = replace(run, step=13)
    assert tab.read(client, Changes(everything=True), run) == (found, 12)
    assert tab.read(client, Changes(kinds={"a": {"step"}}), later) == (found, 13)
    assert tab.read(client, Changes(kinds={"a": {"eval"}, "b": {"checkpoint"}}), later) is None
    assert len(asked) == 1
    tab.read(client, Changes(kinds={"a": {"checkpoint"}}), run)
    assert len(asked) == 2


async def test_a_run_without_checkpoints_says_so() -> None:
    async with using(a_world()) as user:
        await opened(user, 4, "No checkpoints yet")
        await user.press("f")
        assert names(user) == []
