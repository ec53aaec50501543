"""The table of runs: which columns it has, in what order runs and sweeps stand, and on what scale they are
drawn."""

import stat
import time
from typing import Any

import pytest

from lorad.client.columns import COLUMNS, filled, leader
from lorad.records.runs import Run
from lorad.tui.dashboard.column_picker import ColumnPicker
from lorad.tui.dashboard.run_columns import FILE, USUAL, remember, remembered, shaped
from lorad.tui.dashboard.run_rows import cells
from lorad.tui.state_files import state_file
from tests.kit.tui_world import (
    World,
    a_run,
    busy_world,
    line,
    names,
    screen_text,
    table,
    until,
    using,
)
from tests.kit.tui_world import shaped as as_shape

Json = dict[str, Any]
SMALL, LARGE = (80, 24), (200, 60)


def ended(name: str, **more: Any) -> Json:
    return a_run(name, state="ended", ended_at=time.time(), **{"reason": "completed", **more})


def a_sweep() -> World:
    """Two of three runs of a sweep work, and one beside it."""
    grid: Json = {"sweep": "grid", "created_at": 1000.0}
    return World(
        a_run("grid-1", eval_last=0.2, **grid),
        a_run("grid-2", eval_last=0.9, **grid),
        ended("grid-3", eval_last=0.4, reason="failed", **grid),
        a_run("alone", created_at=900.0),
    )


def heading(user: Any) -> str:
    return next(row for row in screen_text(user).splitlines() if row.lstrip().startswith("name"))


async def test_runs_without_rewards_have_their_loss() -> None:
    loss = {"loss": 0.651, "pair_accuracy": 0.75}
    async with using(World(a_run("pairs", reward=None, signals=loss)), size=LARGE) as user:
        await until(user, lambda: "loss 0.651, pairs 75%" in screen_text(user))
        assert "figure" in heading(user) and "reward" not in heading(user)


async def test_runs_that_work_wait_and_ended_stand_so() -> None:
    world = World(
        ended("over", created_at=time.time()),
        a_run("paused", state="paused"),
        a_run("waits", state="queued", created_at=time.time()),
        a_run("works", created_at=900.0),
    )
    async with using(world) as user:
        await until(user, lambda: names(user) == ["works", "waits", "paused", "over"])


def test_ended_runs_are_quieter_unless_they_failed() -> None:
    over, failed = (as_shape(Run, ended("a", reason=why)) for why in ("completed", "failed"))
    assert {str(text.style) for name, text in cells(over).items() if name != "state"} == {"dim"}
    assert str(cells(failed)["state"].style) == "bold red"
    assert str(cells(as_shape(Run, a_run("a")))["name"].style) == ""


@pytest.mark.system
async def test_chosen_columns_are_shown_and_remembered() -> None:
    world = busy_world()
    asked: list[Json] = []

    def select(body: Json) -> Json:
        asked.append(body)
        return {"items": [{**run, "values": {"trainer.lr": 3e-05}} for run in world.runs]}

    world.answers["POST select"] = select
    async with using(world, LARGE) as user:
        await until(user, lambda: len(names(user)) == 3)
        await user.press("c")
        await until(user, lambda: isinstance(user.app.screen, ColumnPicker))
        await user.press(*"trainer.lr", "space", *["backspace"] * 10, *"eta", "space", "enter")
        await until(user, lambda: "trainer.lr" in heading(user) and "3e-05" in screen_text(user))
        assert "eta" not in heading(user) and asked[0]["keys"] == ["trainer.lr"]
    assert stat.S_IMODE(state_file(FILE).stat().st_mode) == 0o600
    world.live(True)
    async with using(world, LARGE) as user:
        await until(user, lambda: "3e-05" in screen_text(user))
        while not any("bold" in body["selection"].get("names", ()) for body in asked):
            world.tell("bold", "step")
            await user.pause(0.05)


async def test_columns_are_moved_and_reset_by_keys() -> None:
    async with using(busy_world(), LARGE) as user:
        await until(user, lambda: len(names(user)) == 3)
        await user.press("c", "down", "shift+down", "enter")
        await until(user, lambda: heading(user).split()[:3] == ["name", "step", "state"])
        await user.press("c", "ctrl+r", "enter")
        await until(user, lambda: heading(user).split()[:3] == ["name", "state", "step"])
    assert not state_file(FILE).exists()


async def test_a_click_chooses_a_column() -> None:
    async with using(busy_world(), SMALL) as user:
        await until(user, lambda: len(names(user)) == 3)
        await user.click("#runs", offset=(77, 0))  # the mark of what did not fit
        await until(user, lambda: "always first" in screen_text(user))
        row = next(y for y, text in enumerate(screen_text(user).splitlines()) if "reward " in text)
        await user.click(offset=(20, row))
        await user.press("enter")
        await until(user, lambda: "reward" not in heading(user))


async def test_a_scrollbar_leaves_the_mark_of_missing_columns() -> None:
    async with using(World(*(a_run(f"run-{n}") for n in range(40))), SMALL) as user:
        await until(user, lambda: len(names(user)) == 40 and table(user).show_vertical_scrollbar)
        await until(user, lambda: "›" in screen_text(user))


async def test_what_does_not_fit_goes_from_the_right() -> None:
    async with using(busy_world(), SMALL) as user:
        await until(user, lambda: len(names(user)) == 3)
        shown = list(table(user).widths)
        assert shown == list(USUAL[: len(shown)]) and len(shown) < len(USUAL)
        assert heading(user).rstrip().endswith(f"+{len(USUAL) - len(shown)}›")
    async with using(busy_world(), LARGE) as user:
        await until(user, lambda: len(names(user)) == 3)
        assert list(table(user).widths) == list(USUAL) and "›" not in heading(user)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"{", "holds no columns"),
        (b'{"columns": "name"}', "holds no columns"),
        (b'{"columns": ["a\\u001b[31m"]}', "is no column"),
        (b'{"columns": %s}' % str([*map(str, range(50))]).replace("'", '"').encode(), "is no column"),
    ],
)
async def test_a_broken_file_is_ignored_with_notice(text: bytes, told: str) -> None:
    state_file(FILE).parent.mkdir(parents=True, exist_ok=True)
    state_file(FILE).write_bytes(text)
    columns, notice = remembered()
    assert columns == USUAL and told in notice and str(state_file(FILE)) in notice
    async with using(busy_world()) as user:
        await until(user, lambda: len(names(user)) == 3 and user.app._notifications)
        assert [told in note.message for note in user.app._notifications] == [True]


def test_a_choice_that_cannot_be_kept_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    with pytest.raises(Exception, match=r"until this session ends: /proc/none/lorad/columns.json"):
        remember(["name"])


async def test_costs_and_devices_come_from_bill_and_pools() -> None:
    world = busy_world()
    world.answers["bill"] = {"by": "run", "rows": [{"key": "bold", "cost": 12.345}], "total": {}}
    remember(["name", "cost", "device"])
    async with using(world) as user:
        await until(user, lambda: "12.35" in screen_text(user))
        row = next(row for row in screen_text(user).splitlines() if "12.35" in row)
        assert row.split()[:4] == ["bold", "!!", "12.35", "cuda:0"]
    run = filled(as_shape(Run, a_run("a")), {"a": "cuda:0 cuda:1"}, {"a": 0.001})
    assert (COLUMNS["device"](run), COLUMNS["cost"](run)) == ("cuda:0 cuda:1", "<0.01")


# -- sweeps --------------------------------------------------------------------------------------------------


async def test_a_sweep_is_one_row_that_opens() -> None:
    async with using(a_sweep()) as user:
        await until(user, lambda: names(user) == ["sweep:grid", "alone"])
        shown = screen_text(user)
        assert "▸ grid (3)" in shown and "●2 ✖1" in shown and "9/30" in shown
        assert line(user, "#why").startswith(
            "sweep grid: 2 running, 1 failed · grid-2 leads: eval 0.300→0.900"
        )
        await user.press("enter")
        await until(user, lambda: names(user) == ["sweep:grid", "grid-1", "grid-2", "grid-3", "alone"])
        assert "▾ grid (3)" in screen_text(user) and "└ grid-2" in screen_text(user)
        await user.press("j", "j", "f")
        await until(user, lambda: names(user) == ["sweep:grid", "alone"] and table(user).key == "sweep:grid")
        await user.press("F")
        await until(user, lambda: len(names(user)) == 5)


async def test_runs_of_a_sweep_stay_below_it() -> None:
    async with using(a_sweep(), LARGE) as user:
        await until(user, lambda: len(names(user)) == 2)
        await user.press("F")
        table(user)._order_by("eval", reverse=True)
        user.app.screen.draw()  # type: ignore[attr-defined]
        await until(user, lambda: names(user) == ["sweep:grid", "grid-2", "grid-3", "grid-1", "alone"])


async def test_actions_on_a_sweep_skip_what_is_over() -> None:
    world = a_sweep()
    async with using(world) as user:
        await until(user, lambda: table(user).key == "sweep:grid")
        await user.press("P")
        await until(user, lambda: len(world.asked) == 2)
        assert world.asked == [("pause", "grid-1"), ("pause", "grid-2")]


async def test_one_shown_run_of_a_sweep_is_itself() -> None:
    async with using(a_sweep()) as user:
        await until(user, lambda: len(names(user)) == 2)
        await user.press("slash", *"grid-2", "enter")
        await until(user, lambda: names(user) == ["grid-2"])


def test_the_leader_has_the_best_figures() -> None:
    low, high, none = (
        as_shape(Run, a_run(name, **figures))
        for name, figures in dict[str, Json](
            {
                "low": {"eval_last": 0.0, "reward": 5.0},
                "high": {"eval_last": 0.1, "reward": float("nan")},
                "none": {"eval_last": None, "reward": None},
            }
        ).items()
    )
    assert leader([low, high, none]) is high and leader([none]) is none
    nll = [as_shape(Run, a_run(str(n), eval_last=None, nll_last=n)) for n in (2.0, 1.0)]
    assert leader(nll) is nll[1]


# -- sparklines ----------------------------------------------------------------------------------------------


async def test_sparklines_share_one_scale() -> None:
    world = World(a_run("low", recent=[0.0, 0.5]), a_run("high", recent=[0.0, 1.0]))
    async with using(world, LARGE) as user:
        await until(user, lambda: len(names(user)) == 2)
        low, high = (table(user).cells(name)["recent"].plain for name in ("low", "high"))
        assert (low, high) == ("▁▅", "▁█") and "recent 0…1" in heading(user)
        await user.press("slash", *"low", "enter")
        await until(user, lambda: table(user).cells("low")["recent"].plain == "▁█")


def test_a_key_without_value_is_a_dash() -> None:
    run = as_shape(Run, a_run("a"))
    assert cells(run, columns=["lora.rank"])["lora.rank"].plain == "-"
    assert [column.key for column in shaped(["name", "kl"])] == ["name", "kl"]
