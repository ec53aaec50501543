"""Curves as files: what is seen, and names that cannot be."""

import csv
import importlib.util
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lorad.errors import SpecError
from lorad.records.measured import Step
from lorad.tui.curves.export import refuse, write
from lorad.tui.curves.plot import CurveLook
from lorad.tui.curves.series import Track
from lorad.tui.screens.dialogs import AskDialog
from tests.kit.tui_world import screen_text, shaped, until
from tests.tui.test_curves import a_world, looking, step


def runs(*names: str) -> dict[str, Track]:
    tracks = {name: Track() for name in names}
    for track in tracks.values():
        numbers = (1, 2, 3)
        track.add(shaped(Step, step(number, kl=None if number == 2 else 0.5)) for number in numbers)
    return tracks


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_csv_has_each_point_and_its_smoothed_value(tmp_path: Path) -> None:
    found = rows(write(str(tmp_path / "a.csv"), ["reward", "kl"], runs("a", "b"), CurveLook(smooth=0.9)))
    assert len(found) == 12 and found[0] == {
        "run": "a", "metric": "reward", "step": "1", "value": "0.001", "smoothed": "0.001",
    }  # fmt: skip
    assert [row["value"] for row in found if (row["run"], row["metric"]) == ("b", "kl")] == [
        *("0.5", "nan", "0.5")
    ]


def test_csv_has_the_window_and_seconds(tmp_path: Path) -> None:
    look = CurveLook(smooth=0.0, x="time")
    found = rows(write(str(tmp_path / "a.csv"), ["reward"], runs("a"), look, (2500, 9000)))
    assert [(row["step"], row["seconds"]) for row in found] == [("2", "3.0"), ("3", "4.0")]


def test_svg_names_metrics_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # it cannot be imported
    path = write(str(tmp_path / "a.svg"), ["reward", "kl"], runs("_a", "<b>$x$"), CurveLook(log=True))
    text = " ".join(ElementTree.parse(path).getroot().itertext())
    assert all(word in text for word in ("reward", "KL to the reference", "A _a", "B <b>$x$"))
    again = write(str(tmp_path / "b.svg"), ["reward", "kl"], runs("_a", "<b>$x$"), CurveLook(log=True))
    assert path.read_bytes() == again.read_bytes()


def test_svg_curve_lies_where_its_values_are(tmp_path: Path) -> None:
    track = Track()
    track.add(shaped(Step, step(number, reward=value)) for number, value in ((1, 0.0), (2, 1.0), (3, 0.5)))
    path = write(str(tmp_path / "a.svg"), ["reward"], {"a": track}, CurveLook(smooth=0.0))
    area = ElementTree.parse(path).getroot().find(".//{*}g/{*}svg")
    assert area is not None
    (line,) = area.iter("{http://www.w3.org/2000/svg}polyline")
    (x1, y1), (x2, y2), (x3, y3) = [map(float, at.split(",")) for at in line.attrib["points"].split()]
    assert (x1, x3) == (0.0, float(area.attrib["width"])) and x2 == x3 / 2
    assert y2 < y3 < y1 and (y1 + y2) / 2 == pytest.approx(y3, abs=0.1)


def test_png_is_written_of_a_run_without_steps(tmp_path: Path) -> None:
    path = write(str(tmp_path / "A.PNG"), ["reward"], {"a": Track()}, CurveLook())
    assert path.read_bytes().startswith(b"\x89PNG")


def test_impossible_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"ends with none of \.png, \.svg, \.csv"):
        write("a.jpg", ["reward"], runs("a"), CurveLook())
    with pytest.raises(SpecError, match="there is no directory /nowhere"):
        refuse("/nowhere/a.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match="a PNG needs matplotlib") as refused:
        refuse(f"{tmp_path}/a.png")
    assert f"Write {tmp_path}/a.svg" in refused.value.hint and "pip install matplotlib" in refused.value.hint
    refuse(f"{tmp_path}/a.csv")
    refuse(f"{tmp_path}/a.svg")


@pytest.mark.system
async def test_key_writes_what_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first-reward.png").touch()
    async with looking(a_world()) as user:
        await user.press("t", "t", "t", "E")
        await until(user, lambda: isinstance(user.app.screen, AskDialog))
        await until(user, lambda: "it exists already" in screen_text(user))
        await user.press("end", *("backspace",) * 3, *"csv", "enter")
        await until(user, lambda: user.app._notifications)
        assert [note.message for note in user.app._notifications] == [
            f"Written to {tmp_path / 'first-reward.csv'}"
        ]
    found = rows(tmp_path / "first-reward.csv")
    assert [found[0]["step"], found[-1]["step"]] == ["351", "400"] and "smoothed" in found[0]
