"""A group lets so many of its owner's runs work at a time, and a queued run may be edited into one."""

import os
from pathlib import Path

import pytest

from lorad.daemon.context import Context
from lorad.daemon.queue.place import place_runs
from lorad.errors import Conflict, LoradError, SpecError
from lorad.states import EndReason, Move
from lorad.store import groups, runs
from tests.kit.daemon_world import open_context, serving, submit

NIGHT = {"group": "night"}


def states(ctx: Context) -> dict[str, str]:
    return {row.name: row.waiting or str(row.state) for row in runs.every(ctx.store)}


def limit(ctx: Context, runs: int | None) -> None:
    groups.set_limit(ctx.store, os.getuid(), "night", runs)


def test_no_more_of_a_group_work_than_may(home: Path) -> None:
    ctx = open_context(home)
    limit(ctx, 1)
    for name in ("a", "b"):
        submit(ctx, name, resources=NIGHT)
    submit(ctx, "other")
    place_runs(ctx)
    waits = "waits for group night (1 of 1 running)"
    assert states(ctx) == {"a": "starting", "b": waits, "other": "starting"}
    runs.move(ctx.store, "a", Move.END, reason=EndReason.STOPPED)
    place_runs(ctx)
    assert states(ctx)["b"] == "starting"


def test_limit_of_a_group_may_change(home: Path) -> None:
    ctx = open_context(home)
    limit(ctx, 0)
    submit(ctx, "a", resources=NIGHT)
    place_runs(ctx)
    assert states(ctx)["a"] == "waits for group night (0 of 0 running)"
    (found,) = groups.groups(ctx.store)
    assert (found.name, found.limit, found.working, found.queued) == ("night", 0, 0, 1)
    limit(ctx, None)
    place_runs(ctx)
    assert states(ctx)["a"] == "starting" and groups.limit_of(ctx.store, os.getuid(), "night") is None


def test_group_of_another_user_is_another_group(home: Path) -> None:
    ctx = open_context(home)
    groups.set_limit(ctx.store, 4321, "night", 0)
    submit(ctx, "a", resources=NIGHT)
    place_runs(ctx)
    assert states(ctx)["a"] == "starting"


async def test_queued_run_is_edited_without_another_training(home: Path) -> None:
    async with serving(home) as api:
        await api("limit_group", "night", 0)
        await api.run("a", "resources.group=night")
        await api.until("a", "queued")
        changed = await api("edit", "a", ["resources.priority=2", "trainer.steps=3"])
        assert (changed.priority, changed.steps, changed.group) == (2, 3, "night")
        for override, says in (
            ("lora.rank=4", "cannot be edited"),
            ("resources.priority=x", "Expected"),
            ("resources.prio=1", "unknown key"),
        ):
            with pytest.raises(SpecError, match=says):
                await api("edit", "a", [override])
        assert (await api("edit", "a", ["resources.group=null"])).group == ""
        done = await api.until("a", "ended")
        assert (done.reason, done.step, done.spec["resources"]["priority"]) == ("completed", 3, 2)
        with pytest.raises(Conflict, match="only a queued run"):
            await api("edit", "a", ["resources.priority=1"])


async def test_tags_and_notes_stay_with_a_run(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a", "tags=[draft, paper]")
        await api("label", "a", add=["good", "paper"], remove=["draft"], note=" the best ")
        found = await api("show", "a")
        assert (found.tags, found.note) == (["paper", "good"], "the best")
        (listed,) = await api("list", all=True)
        assert (listed.tags, listed.note) == (found.tags, found.note)
        await api("label", "a", note="")
        assert (await api("show", "a")).note == "" and (await api("show", "a")).tags == found.tags
        for bad in (["a b"], ["x" * 41], [str(number) for number in range(40)]):
            with pytest.raises(LoradError):
                await api("label", "a", add=bad)
        assert [event.data["note"] for event in await api("history", "a") if event.kind == "labels"] == [
            "the best",
            "",
        ]
        await api.until("a", "ended")
