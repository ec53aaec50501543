"""A table of many rows: pages, marks, an order, and a cursor that stays with its row."""

import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rich.text import Text
from textual.app import App, ComposeResult
from textual.pilot import Pilot

from lorad.tui.widgets.columns import TableColumn, layout
from lorad.tui.widgets.table import MARK, PAGE, Rows, ordered

COLUMNS = (
    TableColumn("name", 6, 20, 0, orders=True),
    TableColumn("reward", 6, 8, 2, right=True, orders=True),
    TableColumn("why", 6, 40, 1, rest=True),
)


class Host(App[None]):
    def compose(self) -> ComposeResult:
        yield Rows(COLUMNS, id="rows")


@asynccontextmanager
async def table(size: tuple[int, int] = (80, 24)) -> AsyncIterator[tuple[Pilot[None], Rows]]:
    async with Host().run_test(size=size) as user:
        rows = user.app.query_one(Rows)
        rows.focus()
        await user.pause()
        yield user, rows


def fill(rows: Rows, names: Iterable[str], rewards: dict[str, Any] | None = None) -> None:
    values = {name: {"name": name, "reward": (rewards or {}).get(name)} for name in names}
    cells = {
        name: {"name": Text(name), "reward": Text(str(value["reward"])), "why": Text("")}
        for name, value in values.items()
    }
    rows.show(cells, values)


def many(count: int) -> list[str]:
    return [f"run-{number:04d}" for number in range(count)]


def under_cursor(rows: Rows) -> str | None:
    return rows.key


def on_screen(rows: Rows) -> list[str]:
    return list(rows.on_page)


def head(rows: Rows) -> list[str]:
    return "".join(part.text for part in rows.heading()).split()


async def test_keys_go_through_pages_of_rows() -> None:
    async with table() as (user, rows):
        fill(rows, many(2 * PAGE + 50))
        await user.press("G")
        assert (rows.page, rows.key, rows.row_count) == (2, "run-0449", 50)
        assert rows.says == "page 3/3"
        await user.press("g")
        assert (rows.page, rows.key) == (0, "run-0000")
        rows.cursor_row = PAGE - 1
        await user.press("j")
        assert (rows.page, rows.key) == (1, f"run-{PAGE:04d}")
        await user.press("k")
        assert (rows.page, rows.key) == (0, f"run-{PAGE - 1:04d}")


async def test_cursor_stays_with_its_row() -> None:
    async with table() as (user, rows):
        fill(rows, ["a", "b", "c"])
        await user.press("j")
        fill(rows, ["x", "y", "a", "b"])
        assert under_cursor(rows) == "b"
        fill(rows, [*many(PAGE), "b"])
        assert (rows.page, under_cursor(rows)) == (1, "b")
        fill(rows, ["x", "y"])
        assert (rows.page, under_cursor(rows) in ("x", "y")) == (0, True)
        fill(rows, [])
        assert under_cursor(rows) is None and rows.chosen == []
        await user.press("j", "k", "G", "g", "space", "o")


async def test_marked_rows_are_chosen_together() -> None:
    async with table() as (user, rows):
        fill(rows, ["a", "b", "c"])
        await user.press("space", "j", "space")
        assert (rows.chosen, rows.key, rows.says) == (["a", "c"], "c", "2 marked")
        assert [rows.cells(name)["name"].plain[0] for name in "abc"] == [MARK, " ", MARK]
        fill(rows, ["c", "b"])
        assert rows.chosen == ["c"]
        rows.unmark()
        assert rows.chosen == [rows.key] and MARK not in rows.cells("c")["name"].plain


async def test_marks_of_other_pages_count() -> None:
    async with table() as (user, rows):
        fill(rows, many(PAGE + 2))
        await user.press("space", "G", "space")
        assert rows.chosen == ["run-0000", f"run-{PAGE + 1:04d}"]


async def test_key_orders_rows_and_marks_the_heading() -> None:
    async with table() as (user, rows):
        fill(rows, ["b", "c", "a"], {"b": 0.5, "a": math.nan})
        await user.press("o")
        assert on_screen(rows) == ["a", "b", "c"] and head(rows) == ["name▲", "reward", "why"]
        await user.press("o", "O")
        assert on_screen(rows) == ["b", "c", "a"] and head(rows) == ["name", "reward▼", "why"]
        await user.press("o")
        assert on_screen(rows) == ["b", "c", "a"] and rows.by == ""


async def test_clicks_on_a_heading_order_and_reverse() -> None:
    async with table() as (user, rows):
        fill(rows, ["b", "c", "a"])
        await user.click(Rows, offset=(2, 0))
        assert on_screen(rows) == ["a", "b", "c"]
        await user.click(Rows, offset=(2, 0))
        assert on_screen(rows) == ["c", "b", "a"]


@pytest.mark.parametrize("is_reversed", [False, True])
def test_rows_without_a_number_go_last(is_reversed: bool) -> None:
    values = {"none": None, "nan": math.nan, "low": -math.inf, "one": 1.0, "high": math.inf, "nan2": math.nan}
    numbers = ["low", "one", "high"]
    assert ordered(list(values), values, is_reversed) == [
        *numbers[:: -1 if is_reversed else 1],
        "none",
        "nan",
        "nan2",
    ]


async def test_an_order_holds_for_what_comes_later() -> None:
    async with table() as (user, rows):
        fill(rows, ["b", "c"], {"b": 0.5, "c": 0.25})
        await user.press("o", "o")
        fill(rows, ["b", "c", "d"], {"b": 0.5, "c": 0.75, "d": 0.6})
        assert on_screen(rows) == ["b", "d", "c"] and rows.key == "b"


async def test_go_leads_to_a_row_on_whatever_page() -> None:
    async with table() as (_, rows):
        fill(rows, many(3 * PAGE))
        rows.go(f"run-{2 * PAGE + 5:04d}")
        assert (rows.page, rows.cursor_row) == (2, 5)
        rows.go("no such row")
        assert rows.page == 2


async def test_columns_follow_the_width_of_the_terminal() -> None:
    async with table((120, 24)) as (user, rows):
        fill(rows, ["日本語の名前がとても長い", "🙂" * 30])
        assert list(rows.widths) == ["name", "reward", "why"]
        assert rows.widths["name"] <= 20 and rows.widths["why"] > 60
        await user.resize_terminal(32, 10)
        await user.pause()
        assert list(rows.widths) == ["name", "why"]
        await user.resize_terminal(3, 3)
        await user.pause()
        assert len(rows.widths) == 1


@pytest.mark.parametrize("room", [0, 1, 40, 1000])
def test_columns_that_must_stay_stay(room: int) -> None:
    widths = layout(COLUMNS, {"name": 10, "reward": 8, "why": 6}, room)
    assert "name" in widths and (room < 26 or sum(widths.values()) + 2 * len(widths) <= room)


# -- the mouse, and what is seen -----------------------------------------------------------------------------
class Noting(Host):
    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def on_rows_selected(self, event: Rows.Selected) -> None:
        self.opened.append(event.key)


async def test_clicks_and_enter_select_and_open() -> None:
    async with (app := Noting()).run_test(size=(80, 24)) as user:
        rows = app.query_one(Rows)
        rows.focus()
        fill(rows, ["a", "b", "c"])
        await user.pause()
        await user.click(Rows, offset=(2, 3))
        assert (rows.key, app.opened) == ("c", [])
        await user.click(Rows, offset=(30, 3))
        await user.press("up", "enter")
        assert (rows.key, app.opened) == ("b", ["c", "b"])
        await user.click(Rows, offset=(2, 9))  # below the last row
        assert (rows.key, app.opened) == ("b", ["c", "b"])


async def test_an_empty_table_opens_nothing() -> None:
    async with (app := Noting()).run_test(size=(80, 24)) as user:
        app.query_one(Rows).focus()
        await user.press("enter")
        await user.click(Rows, offset=(2, 1))
        assert app.opened == []


async def test_cursor_row_and_heading_stay_visible() -> None:
    async with table((40, 6)) as (user, rows):
        fill(rows, many(20))
        await user.pause()
        for keys, seen in (
            (["end"], range(15, 20)),
            (["pageup"], range(14, 19)),
            (["home"], range(5)),
            (["down"] * 5, range(1, 6)),
        ):
            await user.press(*keys)
            await user.pause()
            lines = [rows.render_line(y).text for y in range(6)]
            assert lines[0].split()[0] == "name" and [line.split()[0] for line in lines[1:]] == [
                f"run-{n:04d}" for n in seen
            ]


async def test_row_under_the_mouse_is_coloured() -> None:
    async with table() as (user, rows):
        fill(rows, ["a", "b", "c"])
        await user.pause()
        plain = rows.render_line(2)
        await user.hover(Rows, offset=(2, 2))
        assert rows.render_line(2) != plain
        await user.press("down")
        await user.press("up")
        assert rows.render_line(2) == plain
