"""Every screen as it looks on the frozen world: `make snapshots` takes the pictures again; look at them
before you keep them."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from textual.containers import VerticalScroll
from textual.geometry import Region
from textual.widget import Widget
from textual.widgets import Button, Input, Tab

from lorad.client.client import Client
from lorad.tui import watch
from lorad.tui.widgets.keybar import KeyBar
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows
from tests.kit.frozen.boxes import two_boxes
from tests.kit.frozen.pictures import LEARNING, PICTURES, SHOWN
from tests.kit.frozen.runs import QWEN
from tests.kit.frozen.walks import BOXES, ODD, WALKS, app_of, transport
from tests.kit.frozen.world import frozen
from tests.kit.tui_world import User, screen_text

__all__ = ["frozen"]
Compare = Callable[..., bool]
SMALL, LARGE, MIDDLE = (80, 24), (160, 50), (120, 36)
# CI draws these on 160x50 too: they have more columns there, or parts side by side
WIDE = {"dashboard", "curves", "samples", "two_runs", "new_run"}
# `make test` draws these: tables, charts, texts, a form, a dialog, an answer as it comes
QUICK = {"dashboard", "curves", "samples", "transcript", "new_run", "confirm", "chat", "serving", "help"}
WHOLE = (KeyBar, Button, Input, Tab, Rows, Line)


@pytest.fixture
def client(frozen: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Client]:
    """In a directory without specs."""
    monkeypatch.chdir(tmp_path)
    yield frozen
    transport(frozen).cut(False)


SIZED = [
    pytest.param(name, size, marks=marks, id=f"{name}-{size[0]}x{size[1]}")
    for name in WALKS
    for size, marks in (
        (SMALL, () if name in QUICK else pytest.mark.system),
        (LARGE, pytest.mark.system if name in WIDE else pytest.mark.long),
    )
]


@pytest.mark.parametrize(("name", "size"), SIZED)
def test_screen(name: str, size: tuple[int, int], client: Client, snap_compare: Compare) -> None:
    """And on 80x24 nothing that one needs is cut off or outside."""
    missing: list[str] = []

    async def walk(user: User) -> None:
        await WALKS[name](user)
        if size == SMALL:
            missing.extend([*outside(user), *cut_keys(user), *cut_boxes(user)])

    assert snap_compare(app_of(client), terminal_size=size, run_before=walk)
    assert missing == []


def outside(user: User) -> list[str]:
    """List what is shown and reaches beyond the screen, also the boxes of dialogs."""
    screen = user.app.screen
    parts = [part for part in screen.walk_children() if isinstance(part, WHOLE) and not scrolls(part)]
    return [
        f"{type(part).__name__} {part.id} at {part.region}"
        for part in (*parts, *boxes(user))
        if part.is_on_screen and part.region.area and not Region(0, 0, *SMALL).contains_region(part.region)
    ]


def scrolls(widget: Widget) -> bool:
    return any(isinstance(above, VerticalScroll) for above in widget.ancestors)


def boxes(user: User) -> list[Widget]:
    return [part for part in user.app.screen.children if part.styles.border_top[0] and part.display]


def cut_keys(user: User) -> list[str]:
    """List the keys that are always shown, and are not."""
    return [
        key.says
        for bar in user.app.screen.query(KeyBar)
        for key in bar.keys
        if key.place == "kept" and key not in [placed for _, placed in bar.placed()]
    ]


def cut_boxes(user: User) -> list[str]:
    text = screen_text(user)
    return [f"{box} without its corners" for box in boxes(user) if not {"╰", "╭"} <= {*text}]


@pytest.mark.parametrize(
    "size", [SMALL, pytest.param(MIDDLE, marks=pytest.mark.long)], ids=["80x24", "120x36"]
)
@pytest.mark.parametrize("name", BOXES)
def test_several_boxes(
    name: str,
    size: tuple[int, int],
    client: Client,
    snap_compare: Compare,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far = two_boxes(client.home.root, tmp_path, monkeypatch)
    monkeypatch.setattr(watch, "SECONDS", 600.0)  # no box is late
    monkeypatch.setattr(watch, "_PERIOD", 600.0)  # and all are asked once
    assert snap_compare(app_of(client), terminal_size=size, run_before=BOXES[name])
    far.live(False)


@pytest.mark.system(but="hostile")
@pytest.mark.parametrize("name", ODD)
def test_odd(name: str, client: Client, snap_compare: Compare) -> None:
    assert snap_compare(app_of(client), terminal_size=MIDDLE, run_before=ODD[name])


@pytest.mark.system(but=["light"])
@pytest.mark.parametrize("theme", ["light", "ansi", "contrast"])
def test_theme(theme: str, client: Client, snap_compare: Compare) -> None:
    assert snap_compare(app_of(client, theme), terminal_size=MIDDLE, run_before=WALKS["dashboard"])


@pytest.mark.system
@pytest.mark.long  # the dashboard has both themes in CI
@pytest.mark.parametrize("theme", ["light", "ansi"])
def test_theme_of_texts(theme: str, client: Client, snap_compare: Compare) -> None:
    assert snap_compare(app_of(client, theme), terminal_size=MIDDLE, run_before=ODD["chances"])


def test_each_picture_is_a_small_png_too() -> None:
    drawn = {path.stem for path in PICTURES.glob("tui-*.svg")}
    stills = {path.stem: path.stat().st_size for path in PICTURES.glob("tui-*.png")}
    assert drawn == {*SHOWN, LEARNING} == set(stills)
    assert sum(stills.values()) < 1_500_000


def test_pictures_contain_no_paths_of_this_machine() -> None:
    here = Path(__file__).parent
    pictures = [*here.glob("__snapshots__/test_snapshots/*.svg"), *PICTURES.glob("tui-*.svg")]
    told = (tempfile.gettempdir(), str(here.parents[1]), str(Path.home()) + "/")
    assert pictures
    assert [path.name for path in pictures if any(part in path.read_text() for part in told)] == []


def test_pictures_show_no_run_that_never_was() -> None:
    pictures = {path.name: path.read_text() for path in PICTURES.glob("tui-*.svg")}
    assert pictures and [name for name, text in pictures.items() if QWEN in text or "cuda:" in text] == []
    assert "smollm2" in pictures["tui-runs.svg"] and "adder" in pictures["tui-run.svg"]
