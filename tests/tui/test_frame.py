"""What holds on every screen: how an action is asked for and done, who may do it, keys, looks,
and the feed.
"""

from typing import Any

import pytest
from rich.text import Text
from textual.widgets import Button, Input

from lorad.box.config import Config, Tui
from lorad.client.client import Client
from lorad.errors import Conflict, DaemonUnreachable, LoradError, SpecError
from lorad.records.daemon import Caller, Status
from lorad.tui.actions import consequences
from lorad.tui.actions.verbs import VERBS
from lorad.tui.app import NAMES, LoradApp
from lorad.tui.feed import Changes, Failed, Feed, Fresh, restricted
from lorad.tui.screens.dialogs import AskDialog, Confirm
from lorad.tui.screens.help import Help, key_names
from lorad.tui.widgets.line import Line
from tests.kit.tui_world import (
    Prepared,
    User,
    World,
    a_run,
    line,
    names,
    screen_text,
    shaped,
    table,
    until,
    using,
)

Json = dict[str, Any]


def client_of(world: World) -> Client:
    return Client(transport=Prepared(world))


def checkpoint(step: int, size: int = 1 << 20) -> Json:
    return {"run": "sorter", "step": step, "version": step, "path": f"checkpoints/{step}", "bytes": size}


# -- what is typed for an action -----------------------------------------------------------------------------
async def test_command_shows_and_does_what_is_typed() -> None:
    world = World(a_run("sorter", state="paused"))
    async with using(world) as user:
        await until(user, lambda: names(user) == ["sorter"])
        await user.press("r")
        await until(user, lambda: "$ lorad resume sorter --detach" in screen_text(user))
        await user.press("tab", *"20", "tab", *"trainer.lr=1e-4")
        told = "$ lorad resume sorter --detach --steps 20 trainer.lr=1e-4"
        await until(user, lambda: told in screen_text(user))
        await user.press("enter")
        await until(user, lambda: world.asked == [("resume", "sorter")])
        assert world.bodies[-1][1] == {"step": None, "steps": 20, "overrides": ["trainer.lr=1e-4"]}
        await until(user, lambda: "lorad resume sorter --detach --steps 20" in line(user, "#status"))


async def test_wrong_input_is_shown_and_does_nothing() -> None:
    world = World(a_run("sorter", state="paused"))
    async with using(world) as user:
        await until(user, lambda: names(user) == ["sorter"])
        await user.press("r", *"two")
        await until(user, lambda: "from step: a whole number" in screen_text(user))
        await user.press("enter", "ctrl+s")
        assert isinstance(user.app.screen, AskDialog) and user.app.screen.query_one("#go", Button).disabled
        await user.press("ctrl+u", "ctrl+k", "tab", "tab", *"'open")
        await until(user, lambda: "settings: has a quote that is not closed" in screen_text(user))
        await user.press("escape")
        await until(user, lambda: not isinstance(user.app.screen, AskDialog))
        assert world.asked == []


async def test_a_field_takes_keys_that_mean_something_elsewhere() -> None:
    async with using(World(a_run("sorter", state="paused"))) as user:
        await until(user, lambda: names(user) == ["sorter"])
        await user.press("r", *"qpTy:?")
        await until(user, lambda: user.app.screen.query_one("#from", Input).value == "qpTy:?")
        assert isinstance(user.app.screen, AskDialog)


# -- what is lost by it --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("verb", "run", "values", "said"),
    [
        ("stop", {}, {}, "writes a checkpoint and ends"),
        ("stop", {"state": "queued"}, {}, "leaves the queue"),
        ("stop", {"state": "ended", "reason": "failed"}, {}, ""),
        ("kill", {"step": 31}, {}, "checkpoint of step 20. Steps 21 to 31 are done again"),
        ("kill", {"step": 21}, {}, "Step 21 is done again"),
        ("kill", {"step": 20}, {}, "start from its checkpoint of step 20."),
        ("kill", {"state": "queued"}, {}, "leaves the queue"),
        ("resume", {"state": "paused", "step": 31}, {}, ""),
        ("resume", {"state": "paused", "step": 31}, {"from": "20"}, ""),
        ("resume", {"state": "paused", "step": 31}, {"from": "10"}, "steps 11 to 31 are done again"),
        (
            "resume",
            {"state": "paused", "step": 11},
            {"from": "10"},
            "step 11 is done again, and what came of it",
        ),
        ("rm", {}, {}, ""),
        ("rm", {"state": "paused", "step": 1}, {}, "1 version, 2 checkpoints (2.0 MiB) and the samples"),
    ],
)
def test_question_names_what_would_be_lost(verb: str, run: Json, values: dict[str, str], said: str) -> None:
    world = World(a_run("sorter", **run))
    world.answers["runs/sorter/checkpoints"] = [checkpoint(10), checkpoint(20)]
    world.answers["versions"] = [{"run": "sorter", "version": 1, "aliases": []}]
    lost = VERBS[verb].lost
    assert lost is not None
    told = lost(client_of(world), "sorter", values)
    assert said in told if said else told == ""


def test_kill_without_a_checkpoint_warns_of_everything() -> None:
    world = World(a_run("sorter", step=5))
    assert "from the beginning: it has no checkpoint. Steps 1 to 5" in consequences.of_kill(
        client_of(world), "sorter", {}
    )


def test_rollback_question_names_both_versions() -> None:
    world = World()
    moves = [{"alias": "bot", "run": "sorter", "version": version} for version in (4, 3)]
    world.answers["aliases/bot/moves"] = moves
    assert "bot serves sorter@3 again instead of sorter@4" in consequences.of_rollback(
        client_of(world), "bot", {}
    )
    world.answers["aliases/bot/moves"] = moves[:1]
    assert consequences.of_rollback(client_of(world), "bot", {}) == ""
    assert "bot" in consequences.of_unalias(client_of(world), "bot", {})


async def test_one_question_covers_all_marked_runs() -> None:
    world = World(a_run("a"), a_run("b"), a_run("over", state="ended", reason="failed"))
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 3)
        await user.press("space", "space", "space", "s")
        await until(user, lambda: "Stop 2 of them?" in screen_text(user))
        assert "a: It finishes" in screen_text(user) and "over:" not in screen_text(user)
        await user.press("y")
        await until(user, lambda: "3 of 3 done." in line(user, "#status"))
        assert world.asked == [("stop", "a"), ("stop", "b"), ("stop", "over")]
        assert user.app.screen.command == "lorad stop a; lorad stop b; lorad stop over"  # type: ignore[attr-defined]


async def test_one_refusal_stops_no_other_action() -> None:
    world = World(a_run("a"), a_run("b"))

    def refuse(body: Json) -> Json:
        raise Conflict("run a is ended", hint="Look again.")

    world.answers["POST runs/a/pause"] = refuse
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 2)
        await user.press("space", "space", "P")
        await until(user, lambda: "1 of 2 done; run a is ended. Look again." in line(user, "#status"))
        assert world.asked == [("pause", "b")]


async def test_result_stays_until_the_cursor_moves() -> None:
    world = World(*(a_run(name, state="ended", reason="completed") for name in ("over", "other", "third")))
    world.answers["POST runs/over"] = {"name": "over"}
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 3)
        await user.press("ctrl+d")
        await until(user, lambda: isinstance(user.app.screen, Confirm))
        await user.press("y")
        await until(user, lambda: "over is deleted" in line(user, "#status"))
        del world.runs[0]
        world.tell("over", "removed")
        await until(user, lambda: names(user) == ["other", "third"])
        await user.pause()
        assert "over is deleted" in line(user, "#status")
        await user.press("j")
        await until(user, lambda: line(user, "#status") == "$ lorad show third")


async def test_misunderstood_answer_is_shown_without_a_crash() -> None:
    world = World(a_run("sorter"))
    world.answers["runs/sorter"] = {"no": "run"}
    async with using(world) as user:
        await until(user, lambda: names(user) == ["sorter"])
        await user.press("x")
        await until(user, lambda: "not understood" in line(user, "#status"))


@pytest.mark.system
async def test_no_is_what_every_careless_key_answers() -> None:
    world = World(a_run("precious"))
    async with using(world) as user:
        await until(user, lambda: names(user) == ["precious"])
        for keys in (["enter"], ["escape"], ["n"], ["tab", "tab", "enter"]):
            await user.press("x")
            await until(user, lambda: isinstance(user.app.screen, Confirm))
            await user.press(*keys)
            await until(user, lambda: not isinstance(user.app.screen, Confirm))
            assert world.asked == []


async def test_a_question_about_many_fits_a_small_terminal() -> None:
    world = World(*(a_run(f"{'long-' * 12}{number}") for number in range(20)))
    async with using(world, (40, 10)) as user:
        await until(user, lambda: len(names(user)) == 20)
        await user.press(*["space"] * 20, "x")
        await until(user, lambda: "Kill 20 of them?" in screen_text(user))
        assert user.app.screen.focused is user.app.screen.query_one("#no")
        await user.press("escape")


# -- who may do what -----------------------------------------------------------------------------------------
async def test_readonly_does_none_of_the_actions() -> None:
    world = World(a_run("sorter"))
    async with using(world, readonly=True) as user:
        await until(user, lambda: names(user) == ["sorter"] and "READ-ONLY" in line(user, "#title"))
        screen: Any = user.app.screen
        for asked in ("P", "r", "s", "x", *VERBS.values()):
            screen.query_one("#status", Line).say(Text("asked"))
            if isinstance(asked, str):
                await user.press(asked)
            else:
                screen.act(asked, ["sorter"])
            await until(user, lambda: "Read-only" in line(user, "#status"))
            assert not world.asked and not world.bodies and user.app.screen is screen


async def test_config_can_make_it_readonly() -> None:
    async with using(World(a_run("sorter")), config=Config(tui=Tui(readonly=True))) as user:
        await until(user, lambda: "READ-ONLY" in line(user, "#title"))


async def test_what_belongs_to_others_is_only_looked_at() -> None:
    world = World(a_run("mine"), a_run("theirs", owner="bob"))
    world.answers["status"] = {"caller": {"user": "ann", "admin": False}}
    async with using(world, (160, 50)) as user:
        await until(user, lambda: len(names(user)) == 2 and user.app.user == "ann")  # type: ignore[attr-defined]
        await user.press("j")
        await until(user, lambda: "⊘ bob" in screen_text(user) and "belongs to bob" in line(user, "#why"))
        assert "⊘ ann" not in screen_text(user)
        await user.press("P")
        await until(user, lambda: "theirs belongs to bob" in line(user, "#status"))
        await user.press("x")
        await user.press("k", "P")
        await until(user, lambda: world.asked == [("pause", "mine")])


async def test_visible_run_of_others_can_be_forked() -> None:
    world = World(a_run("theirs", owner="bob"))
    world.answers["status"] = {"caller": {"user": "ann", "admin": False}}
    async with using(world) as user:
        await until(user, lambda: names(user) == ["theirs"] and user.app.user == "ann")  # type: ignore[attr-defined]
        user.app.screen.act(VERBS["fork"], ["theirs"])  # type: ignore[attr-defined]
        await until(user, lambda: isinstance(user.app.screen, AskDialog))


async def test_many_runs_resume_but_only_one_forks() -> None:
    world = World(a_run("a", state="paused"), a_run("b", state="paused"))
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 2)
        await user.press("space", "space", "r")
        await until(user, lambda: isinstance(user.app.screen, AskDialog))
        await user.press("ctrl+s")
        await until(user, lambda: world.asked == [("resume", "a"), ("resume", "b")])
        user.app.screen.act(VERBS["fork"], ["a@1", "a@2"])  # type: ignore[attr-defined]
        await until(user, lambda: "fork is for one at a time, and 2 are marked" in line(user, "#status"))


# -- keys and looks ------------------------------------------------------------------------------------------
async def test_keymap_changes_keys_and_help() -> None:
    world = World(a_run("sorter"))
    async with using(world, config=Config(tui=Tui(keymap={"run.pause": "f9", "app.help": "f2"}))) as user:
        await until(user, lambda: names(user) == ["sorter"])
        await user.press("P", "f9")
        await until(user, lambda: world.asked == [("pause", "sorter")])
        await user.press("f2")
        await until(user, lambda: isinstance(user.app.screen, Help))
        shown = next(row for row in screen_text(user).splitlines() if "run.pause" in row)
        assert shown.split()[1] == "f9" or shown.split()[0] == "f9"


@pytest.mark.system
async def test_help_shows_keys_of_the_current_screen() -> None:
    async with using(World(a_run("sorter")), (100, 60)) as user:
        await until(user, lambda: names(user) == ["sorter"])
        await user.press("question_mark")
        await until(
            user, lambda: "board.filter" in screen_text(user) and "curves.log" not in screen_text(user)
        )
        await user.press("escape", "enter", "1")
        await until(user, lambda: "1 curves" in screen_text(user))
        await user.press("question_mark")
        await until(
            user, lambda: "curves.log" in screen_text(user) and "board.filter" not in screen_text(user)
        )
        await user.press("escape", "2")
        await until(
            user, lambda: "No samples yet" in screen_text(user) or "has no samples" in screen_text(user)
        )
        await user.press("question_mark")
        await until(
            user, lambda: "samples.unfold" in screen_text(user) and "curves.log" not in screen_text(user)
        )


@pytest.mark.system
async def test_help_finds_keys_of_every_screen_by_words() -> None:
    async with using(World(a_run("sorter"))) as user:
        await until(user, lambda: names(user) == ["sorter"])
        await user.press("question_mark", "slash", *"fork", "space", *"check")
        await until(
            user, lambda: "checkpoints.fork" in screen_text(user) and "board.filter" not in screen_text(user)
        )
        await user.press(*"qqq")
        await until(user, lambda: "No key has all of these words." in screen_text(user))
        await user.press("escape")
        await until(user, lambda: "board.filter" in screen_text(user))
        await user.press("escape")
        await until(user, lambda: not isinstance(user.app.screen, Help))


async def test_help_opens_over_a_question_too() -> None:
    async with using(World(a_run("sorter", state="paused"))) as user:
        await until(user, lambda: names(user) == ["sorter"])
        await user.press("r")
        await until(user, lambda: isinstance(user.app.screen, AskDialog))
        await user.press("f1")
        await until(user, lambda: "ask.go" in screen_text(user) and "board.filter" not in screen_text(user))
        await user.press("escape")
        await until(user, lambda: isinstance(user.app.screen, AskDialog))


def test_keys_are_named_as_they_are_typed() -> None:
    assert key_names("number_sign,escape,ctrl+p,space,right_square_bracket") == "# esc ctrl+p space ]"


@pytest.mark.parametrize(
    ("tui", "told"),
    [
        (Tui(keymap={"run.explode": "e"}), r"tui\.keymap: no action has the id run\.explode"),
        (Tui(theme="pink"), r"tui\.theme: there is no theme pink"),
    ],
)
def test_unknown_ids_and_themes_are_refused(tui: Tui, told: str) -> None:
    with pytest.raises(SpecError, match=told) as refused:
        LoradApp(client_of(World()), config=Config(tui=tui))
    assert "run.kill" in refused.value.hint or "contrast" in refused.value.hint


@pytest.mark.parametrize(("theme", "textual"), [("contrast", NAMES["contrast"]), ("nord", "nord")])
async def test_every_theme_shows_the_same(theme: str, textual: str) -> None:
    async with using(World(a_run("sorter")), config=Config(tui=Tui(theme=theme))) as user:
        await until(user, lambda: "● running" in screen_text(user))
        assert user.app.theme == textual


async def test_a_key_goes_through_the_themes() -> None:
    async with using(World(a_run("sorter"))) as user:
        seen = {user.app.theme}
        for _ in range(len(NAMES)):
            await user.press("T")
            seen.add(user.app.theme)
            await until(user, lambda: "● running" in screen_text(user))
        assert seen == set(NAMES.values())


# -- the palette ---------------------------------------------------------------------------------------------
async def palette(user: User, *typed: str) -> None:
    await user.press("ctrl+p", *typed)
    await until(user, lambda: "Pause sorter" in screen_text(user))
    await user.press("down", "enter")


async def test_palette_acts_on_the_chosen_run() -> None:
    world = World(a_run("sorter"))
    async with using(world) as user:
        await until(user, lambda: names(user) == ["sorter"])
        await palette(user, *"pause sor")
        await until(user, lambda: world.asked == [("pause", "sorter")])


@pytest.mark.parametrize(
    ("state", "offered"),
    [
        ("running", {"pause", "stop", "kill", "delete"}),
        ("paused", {"resume", "stop", "kill", "delete"}),
        ("ended", {"resume", "delete"}),
    ],
)
async def test_the_palette_offers_what_is_left_to_do(state: str, offered: set[str]) -> None:
    async with using(World(a_run("sorter", state=state))) as user:
        await until(user, lambda: names(user) == ["sorter"])
        titles = [command.title for command in user.app.get_system_commands(user.app.screen)]
        assert {title.split()[0].lower() for title in titles if title.endswith(" sorter")} == offered


def test_every_verb_has_its_own_command() -> None:
    typed = {"priority": "3", "overrides": "a=1", "tags": "t", "note": "n", "name": "new"}
    lines = {name: verb.command("sorter@1", typed) for name, verb in VERBS.items()}
    assert len(set(lines.values())) == len(lines)
    assert all(text.startswith("lorad ") for text in lines.values())
    assert all(verb.says for verb in VERBS.values())


# -- the feed ------------------------------------------------------------------------------------------------
def test_older_daemon_without_caller_restricts_nobody() -> None:
    assert restricted(shaped(Status, {"pid": 1})) is None
    assert restricted(Status(1, caller=Caller("ann", True))) is None
    assert restricted(Status(1, caller=Caller("ann", False))) == "ann"


async def test_frozen_nothing_changes_and_thawed_everything_does() -> None:
    world = World(a_run("sorter"))
    async with using(world) as user:
        await until(user, lambda: "3/10" in screen_text(user))
        await user.press("H")
        await until(user, lambda: "NOT REFRESHED" in line(user, "#title"))
        world.runs = [a_run("sorter", step=7), a_run("new")]
        world.tell("sorter", "step")
        world.tell("new")
        await user.pause(0.8)
        assert "3/10" in screen_text(user) and names(user) == ["sorter"]
        await user.press("H")
        await until(user, lambda: "7/10" in screen_text(user) and len(names(user)) == 2)


class View:
    """A screen that asks for what fails at first."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.changes, self.got = list(errors), list[Changes](), list[Any]()

    def read(self, client: Client, changes: Changes) -> Json | None:
        self.changes.append(changes)
        if self.errors:
            raise self.errors.pop(0)
        return {}

    def post_message(self, message: Any) -> bool:
        self.got.append(message)
        return True


@pytest.mark.parametrize("error", [LoradError("no", hint=""), DaemonUnreachable("gone", hint="")])
def test_failed_read_is_repeated_next_tick(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(error)
    feed = Feed(client_of(World()), view)  # type: ignore[arg-type]
    feed.open(view)
    feed._read(view, feed._taken())
    told = [message.error.message for message in view.got if isinstance(message, Failed)]
    assert told == ([] if isinstance(error, DaemonUnreachable) else ["no"])
    monkeypatch.setattr("lorad.tui.feed.TICK", 0.0)
    again = feed._taken()
    assert again.everything and again.tick
    feed._read(view, again)
    assert isinstance(view.got[-1], Fresh) and not feed._taken().everything


async def test_removed_run_loses_its_mark() -> None:
    world = World(a_run("a"), a_run("b"))
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 2)
        await user.press("space")
        assert table(user).chosen == ["a"]
        world.runs = [a_run("b")]
        world.tell("a")
        await until(user, lambda: names(user) == ["b"])
        assert table(user).chosen == ["b"]
