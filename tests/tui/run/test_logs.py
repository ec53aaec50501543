"""The logs of a run: followed, filtered, of one process or another, and never more than fits into memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lorad.client.client import Client
from lorad.client.log_lines import has_words, level, words
from lorad.records.runs import RunDetails
from lorad.tui.feed import Changes
from lorad.tui.run.log_lines import LogLines, clean
from lorad.tui.run.logs import BEGIN, Logs, LogView, sources
from lorad.tui.run.screen import RunScreen
from tests.kit.tui_world import (
    HOSTILE,
    SHOWN,
    Prepared,
    User,
    World,
    a_run,
    screen_text,
    shaped,
    until,
    using,
)

Json = dict[str, Any]

SERVERS = {"trainer": {"backend": "fsdp"}, "rollout": {"backend": "vllm", "servers": 2}}


class Files(dict[str, str]):
    """Logs by process, served as the daemon does."""

    def read(self, query: dict[str, str]) -> Json:
        data, offset = self.get(query["of"], "").encode(), int(query["offset"])
        start = max(0, len(data) + offset) if offset < 0 else offset if offset <= len(data) else 0
        text = data[start : start + int(query["limit"])]
        return {"text": text.decode(), "offset": start + len(text), "size": len(data)}


@asynccontextmanager
async def looking_at(
    files: Files, size: tuple[int, int] = (100, 30), **run: Any
) -> AsyncIterator[tuple[User, World]]:
    """The tab of the logs of a run, in front."""
    world = World(a_run("sorter", **run))
    world.answers["runs/sorter/logs"] = files.read
    async with using(world, size) as user:
        await until(user, lambda: "sorter" in screen_text(user))
        user.app.open_run("sorter")  # type: ignore[attr-defined]
        await until(user, lambda: isinstance(user.app.screen, RunScreen))
        await user.press("5")
        await until(user, lambda: "[driver]" in screen_text(user))
        yield user, world


def view(user: User) -> LogView:
    return user.app.screen.query_one(LogView)


def lines(count: int) -> str:
    return "".join(f"step {number}\n" for number in range(1, count + 1))


@pytest.mark.system
async def test_end_is_followed_until_scrolled_up() -> None:
    files = Files(driver=lines(200))
    async with looking_at(files) as (user, world):
        await until(user, lambda: "step 200" in screen_text(user) and "▼ follows" in screen_text(user))
        files["driver"] += "step 201\n"
        world.tell("sorter", "step")
        await until(user, lambda: "step 201" in screen_text(user))
        await user.press("g")
        await until(user, lambda: "step 1 " in screen_text(user) and "‖ stays here" in screen_text(user))
        files["driver"] += "step 202\n"
        world.tell("sorter", "step")
        await until(user, lambda: "202 lines" in screen_text(user))
        assert "step 1 " in screen_text(user) and "step 202" not in screen_text(user)
        await user.press("f")
        await until(user, lambda: "step 202" in screen_text(user) and "▼ follows" in screen_text(user))


@pytest.mark.system
async def test_filter_applies_while_it_is_typed() -> None:
    files = Files(driver=lines(30) + "ERROR: step 3 broke\n")
    async with looking_at(files) as (user, world):
        await until(user, lambda: "31 lines" in screen_text(user))
        await user.press("slash", *"step")
        await until(user, lambda: "31 of 31 lines" in screen_text(user))
        await user.press(*" 3 !error")
        await until(user, lambda: "4 of 31 lines" in screen_text(user))  # 3, 13, 23, 30
        files["driver"] += "step 33\nstep 44\n"
        world.tell("sorter", "step")
        await until(user, lambda: "of 33 lines" in screen_text(user))
        assert "step 33" in screen_text(user) and "step 44" not in screen_text(user)
        await user.press("enter", "escape")
        await until(user, lambda: "ERROR: step 3" in screen_text(user) and "33 lines" in screen_text(user))
        await user.press("escape")
        await until(user, lambda: not isinstance(user.app.screen, RunScreen))


@pytest.mark.system
async def test_each_process_has_its_log_and_its_command() -> None:
    files = Files({"driver": "of the driver\n", "trainer": "of the trainer\n", "engine-1": "of the second\n"})
    async with looking_at(files, spec=SERVERS) as (user, _):
        await until(user, lambda: "of the driver" in screen_text(user))
        await user.press("o", "o")
        await until(user, lambda: "of the trainer" in screen_text(user) and "[trainer]" in screen_text(user))
        assert "of the driver" not in screen_text(user)
        assert user.app.screen.query_one(Logs).command() == "lorad logs sorter --of trainer -f"
        await user.press("O", "O", "O")
        await until(user, lambda: "of the second" in screen_text(user))
        await user.click("#log-sources", offset=(3, 0))
        await until(user, lambda: "of the driver" in screen_text(user))


@pytest.mark.parametrize(
    ("run", "found"),
    [
        ({}, ["driver"]),
        ({"pool": "tiny-1"}, ["driver", "pool"]),
        ({"pool": "x", "spec": SERVERS}, ["driver", "pool", "trainer", "engine", "engine-1"]),
        ({"pool": "x", "spec": {"rollout": {"backend": "vllm", "urls": ["http://x:1"]}}}, ["driver", "pool"]),
    ],
)
def test_only_processes_with_logs_are_offered(run: dict[str, Any], found: list[str]) -> None:
    assert sources(shaped(RunDetails, a_run("a") | {"pool": None} | run)) == found


@pytest.mark.system
async def test_truncated_or_new_log_is_read_anew() -> None:
    files = Files(driver=lines(50))
    async with looking_at(files) as (user, world):
        await until(user, lambda: "50 lines" in screen_text(user))
        files["driver"] = "cut\n"
        world.tell("sorter", "step")
        await until(user, lambda: "1 line " in screen_text(user) and "cut" in screen_text(user))
        files["driver"], world.runs[0]["attempt"] = "another, longer than that\n", 2
        world.tell("sorter")
        await until(user, lambda: "another, longer" in screen_text(user))
        assert view(user).lines.all == ["another, longer than that"]


async def test_what_programs_print_is_shown_literally() -> None:
    files = Files(driver=f"{HOSTILE}\ntab\there 日本 🙂\n")
    async with looking_at(files) as (user, _):
        await until(user, lambda: SHOWN in screen_text(user) and "日本" in screen_text(user))
        assert "\x1b" not in screen_text(user) and "\t" not in screen_text(user)


@pytest.mark.system
async def test_levels_have_signs_as_well_as_colours() -> None:
    files = Files(driver="fine\nWARNING: odd\nRuntimeError: bad\n")
    async with looking_at(files) as (user, _):
        await until(user, lambda: "✖ RuntimeError: bad" in screen_text(user))
        assert "! WARNING: odd" in screen_text(user) and "  fine" in screen_text(user)


@pytest.mark.system
async def test_an_empty_log_says_so() -> None:
    async with looking_at(Files()) as (user, _):
        await until(user, lambda: "nothing printed" in screen_text(user))


def test_log_of_an_ended_run_is_read_once() -> None:
    asked = list[dict[str, str]]()

    def read(query: dict[str, str]) -> Json:
        asked.append(query)
        return Files(driver="done\n").read(query)

    run = a_run("sorter", state="ended", reason="completed")
    world, tab = World(run), Logs("sorter")
    world.answers["runs/sorter/logs"] = read
    client = Client(transport=Prepared(world))
    row = shaped(RunDetails, run)
    part = tab.read(client, Changes(everything=True), row)
    assert part is not None and part.text == "done\n"
    assert tab.read(client, Changes(tick=True, kinds={"other": {"step"}}), row) is None and len(asked) == 1


def test_fast_growing_log_is_read_from_its_end() -> None:
    run, tab, files = a_run("sorter"), Logs("sorter"), Files(driver="first\n")
    world = World(run)
    world.answers["runs/sorter/logs"] = files.read
    client = Client(transport=Prepared(world))
    row = shaped(RunDetails, run)
    tab.read(client, Changes(everything=True), row)
    files["driver"] += "x" * (6 << 20) + "\nlast\n"
    part = tab.read(client, Changes(tick=True), row)
    assert (
        part is not None
        and part.is_new
        and part.text == "last\n"
        and part.before == len(files["driver"]) + BEGIN
    )


@pytest.mark.system
@pytest.mark.parametrize("size", [pytest.param((40, 10), marks=pytest.mark.long), (12, 3)])
async def test_any_size_does(size: tuple[int, int]) -> None:
    async with looking_at(Files(driver=lines(50) + "wide " * 100 + "\n")) as (user, _):
        await until(user, lambda: "51 lines" in screen_text(user))
        await user.resize_terminal(*size)
        await user.press("slash", *"wide", "enter", "right", "g", "G", "escape")
        await user.resize_terminal(100, 30)
        await until(user, lambda: "51 lines" in screen_text(user) and "▼ follows" in screen_text(user))


def test_lines_beyond_the_bound_go_from_the_front() -> None:
    log = LogLines(most=1000)
    log.filter("7")
    gone = sum(log.add(lines(100)) for _ in range(1000))
    assert len(log.all) <= 1100 and log.shown == [line for line in log.all if "7" in line]
    assert gone + len(log.shown) == 1000 * sum("7" in str(number) for number in range(1, 101))


def test_a_hundred_thousand_lines_are_taken_in_bounded() -> None:
    log = LogLines()
    log.add(clean(lines(100_000)))
    assert len(log.all) == 50_000 and log.all[-1] == "step 100000"


def test_unfinished_line_continues_with_the_next_text() -> None:
    log = LogLines()
    log.filter("now")
    for text in ("step", " 1 n", "ow\nstep 2"):
        log.add(clean(text))
    assert (log.all, log.shown) == (["step 1 now", "step 2"], ["step 1 now"])


def test_progress_bar_shows_its_last_state() -> None:
    log = LogLines()
    for text in ("a\n\r10%", "\r20%\r30%", "\r40%\nb\r\n"):
        log.add(clean(text))
    assert log.all == ["a", "40%", "b"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("2026-01-01 ERROR engine: x", "error"),
        ("Traceback (most recent call last):", "error"),
        ("torch.OutOfMemoryError: x", "error"),
        ("0 errors, no Error at all", ""),
        ("[WARNING] x", "warning"),
        ("UserWarning: x", "warning"),
        ("DEBUG x", "debug"),
        ("step 3  reward 0.5", ""),
    ],
)
def test_level_is_read_from_the_line(line: str, found: str) -> None:
    assert level(line) == found


@pytest.mark.parametrize(
    ("filter", "found"),
    [
        ("", True),
        ("FIX", True),
        ("fix step", True),
        ("fix nope", False),
        ("!fix", False),
        ('"a fix"', True),
        ('"', True),
    ],
)
def test_line_must_contain_all_filter_words(filter: str, found: bool) -> None:
    assert has_words("Step 3: a fix", words(filter)) is found
