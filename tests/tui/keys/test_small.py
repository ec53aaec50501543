"""Every screen is whole on 80x24: nothing that one needs is cut off or outside."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.containers import VerticalScroll
from textual.geometry import Region
from textual.widget import Widget
from textual.widgets import Button, Input, Tab

from lorad.client.client import Client
from lorad.tui.widgets.keybar import KeyBar
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows
from tests.kit.frozen.walks import WALKS, app_of, transport
from tests.kit.frozen.world import frozen
from tests.kit.tui_world import User, screen_text

__all__ = ["frozen"]
SIZE = (80, 24)
WHOLE = (KeyBar, Button, Input, Tab, Rows, Line)


@pytest.fixture
def client(frozen: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Client]:
    monkeypatch.chdir(tmp_path)
    yield frozen
    transport(frozen).cut(False)


def scrolls(widget: Widget) -> bool:
    return any(isinstance(above, VerticalScroll) for above in widget.ancestors)


def outside(user: User) -> list[str]:
    """List what is shown and reaches beyond the screen, also the boxes of dialogs."""
    whole, screen = Region(0, 0, *SIZE), user.app.screen
    wanted = [one for one in screen.walk_children() if isinstance(one, WHOLE) and not scrolls(one)]
    boxes = [one for one in screen.children if one.styles.border_top[0] and one.display]
    return [
        f"{type(one).__name__} {one.id} at {one.region}"
        for one in (*wanted, *boxes)
        if one.is_on_screen and one.region.area and not whole.contains_region(one.region)
    ]


def cut_keys(user: User) -> list[str]:
    """List the keys that are always shown, and are not."""
    bars = user.app.screen.query(KeyBar)
    return [
        key.says
        for bar in bars
        for key in bar.keys
        if key.place == "kept" and key not in [k for _, k in bar.placed()]
    ]


@pytest.mark.system(but=["bill", "palette"])
@pytest.mark.parametrize("name", WALKS)
async def test_screen_is_whole(name: str, client: Client) -> None:
    async with app_of(client).run_test(size=SIZE) as user:
        await WALKS[name](user)
        assert outside(user) == []
        assert cut_keys(user) == []
        for box in user.app.screen.children:
            if box.styles.border_top[0]:
                assert "╰" in screen_text(user) and "╭" in screen_text(user)
