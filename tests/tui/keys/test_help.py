"""The help begins with the keys of the view that one looks at."""

import pytest
from textual.widgets import Static, TabbedContent

from lorad.tui.actions.table import ACTIONS, HELP
from lorad.tui.palette.screen import CommandLine
from lorad.tui.run.screen import RunScreen
from lorad.tui.screens.help import Help
from tests.kit.tui_world import User, World, a_run, names, screen_text, until, using

FIRST = {
    "curves": "Curves",
    "samples": "Samples",
    "versions": "Versions",
    "checkpoints": "Checkpoints",
    "logs": "Logs",
    "spec": "Specs",
    "events": "Events",
    "why": "Why it does not learn",
}
IN_CI = (2, 4, 8)  # each tab says by the same code which keys are its own


async def heading(user: User) -> str:
    """Return the first heading of the help of this place."""
    await user.press("f1")
    await until(user, lambda: isinstance(user.app.screen, Help) and user.app.screen.query("#help-table"))
    await until(user, lambda: "keys that work here" in screen_text(user))
    shown = user.app.screen.query_one("#help-table", Static)
    return "".join(part.text for part in shown.render_lines(shown.region.reset_offset)[0]).strip()


@pytest.mark.system(but=["4", "8"])
@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=() if number in IN_CI else pytest.mark.long) for number in range(1, 9)],
)
async def test_help_begins_with_the_tab(number: int) -> None:
    async with using(World(a_run("sorter", spec={})), (80, 24)) as user:
        await until(user, lambda: names(user) == ["sorter"])
        await user.press("enter")
        await until(user, lambda: isinstance(user.app.screen, RunScreen))
        await user.press(str(number))
        tab = user.app.screen.query_one(TabbedContent).active.removeprefix("pane-")
        assert await heading(user) == FIRST[tab]


async def test_help_of_dashboard_and_line_begin_with_theirs() -> None:
    async with using(World(a_run("sorter")), (80, 24)) as user:
        await until(user, lambda: names(user) == ["sorter"])
        assert await heading(user) == "The dashboard"
        await user.press("escape", "colon")
        await until(user, lambda: isinstance(user.app.screen, CommandLine))
        assert await heading(user) == "The command line"


def test_every_key_stands_once_in_the_help() -> None:
    ids = [row.id for rows in ACTIONS.values() for row in rows if row.keys]
    assert len(set(ids)) == len(ids)
    in_help = {row.id for rows in HELP.values() for row in rows}
    again = {row.id for view in ("over", "prompt") for row in ACTIONS[view]}  # of a dialog, as elsewhere
    assert set(ids) - in_help == again
