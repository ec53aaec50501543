"""Every screen as it looks on the frozen world: `make snapshots` takes the pictures again; look at them
before you keep them."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lorad.client.client import Client
from lorad.tui import watch
from tests.kit.frozen.boxes import two_boxes
from tests.kit.frozen.pictures import LEARNING, PICTURES, SHOWN
from tests.kit.frozen.runs import QWEN
from tests.kit.frozen.walks import BOXES, ODD, WALKS, app_of, transport
from tests.kit.frozen.world import frozen

__all__ = ["frozen"]
Compare = Callable[..., bool]
SMALL, LARGE, MIDDLE = (80, 24), (160, 50), (120, 36)


@pytest.fixture
def client(frozen: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Client]:
    """In a directory without specs."""
    monkeypatch.chdir(tmp_path)
    yield frozen
    transport(frozen).cut(False)


@pytest.mark.parametrize(
    "size", [SMALL, pytest.param(LARGE, marks=pytest.mark.system)], ids=["80x24", "160x50"]
)
@pytest.mark.parametrize("name", WALKS)
def test_screen(name: str, size: tuple[int, int], client: Client, snap_compare: Compare) -> None:
    assert snap_compare(app_of(client), terminal_size=size, run_before=WALKS[name])


@pytest.mark.parametrize(
    "size", [SMALL, pytest.param(MIDDLE, marks=pytest.mark.system)], ids=["80x24", "120x36"]
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


@pytest.mark.system(but=["markdown", "hostile"])
@pytest.mark.parametrize("name", ODD)
def test_odd(name: str, client: Client, snap_compare: Compare) -> None:
    assert snap_compare(app_of(client), terminal_size=MIDDLE, run_before=ODD[name])


@pytest.mark.system(but=["light"])
@pytest.mark.parametrize("theme", ["light", "ansi", "contrast"])
def test_theme(theme: str, client: Client, snap_compare: Compare) -> None:
    assert snap_compare(app_of(client, theme), terminal_size=MIDDLE, run_before=WALKS["dashboard"])


@pytest.mark.system
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
