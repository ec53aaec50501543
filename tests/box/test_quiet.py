"""Quiet hours by the clock on the wall, over midnight and where summer time begins and ends."""

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from lorad.box.config import load
from lorad.box.quiet import parse, quiet_until
from lorad.errors import SpecError


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")  # Berlin's rule
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def ends(at: str, *windows: str) -> str:
    """When quiet hours end in which that time lies, by the clock; "" where it lies in none."""
    until = quiet_until([parse(text) for text in windows], datetime.fromisoformat(at).timestamp())
    return "" if until is None else datetime.fromtimestamp(until).isoformat(" ", "minutes")


OFFICE = "mon-fri 09:00-18:00"  # 2026-11-25 is a Wednesday


@pytest.mark.parametrize(
    ("at", "windows", "end"),
    [
        ("2026-11-25 08:59", [OFFICE], ""),
        ("2026-11-25 09:00", [OFFICE], "2026-11-25 18:00"),
        ("2026-11-25 18:00", [OFFICE], ""),
        ("2026-11-28 12:00", [OFFICE], ""),
        ("2026-11-25 23:30", ["wed 22:00-06:00"], "2026-11-26 06:00"),
        ("2026-11-26 05:59", ["wed 22:00-06:00"], "2026-11-26 06:00"),
        ("2026-11-25 05:59", ["wed 22:00-06:00"], ""),
        ("2026-11-29 12:00", ["fri-mon 00:00-24:00"], "2026-12-01 00:00"),
        ("2026-11-25 12:00", ["09:00-12:30", "12:30-14:00"], "2026-11-25 14:00"),
        ("2026-11-25 12:00", ["sat,sun 8:00-20:00"], ""),
        ("2026-03-29 03:10", ["01:30-03:30"], "2026-03-29 03:30"),  # the clock went from 2 to 3
        ("2026-03-29 03:00", ["02:15-04:00"], "2026-03-29 04:00"),
    ],
)
def test_windows_hold_by_the_wall_clock(at: str, windows: list[str], end: str) -> None:
    assert ends(at, *windows) == end


def test_a_repeated_hour_is_quiet_twice() -> None:
    window = [parse("01:00-02:30")]
    first = datetime(2026, 10, 25, 2, 10).timestamp()  # comes again an hour later
    found = [quiet_until(window, first + 60 * minutes) for minutes in (0, 30, 60, 79, 80)]
    assert [until is not None for until in found] == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("noon", "is no time of the week: write it as 'mon-fri 09:00-18:00'"),
        ("mon-fry 09:00-18:00", "mon-fry is no day; they are mon, tue"),
        ("09:00-25:00", "has a time that no clock shows"),
        ("09:70-10:00", "has a time that no clock shows"),
        ("09:00-09:00", "is empty: a whole day is 00:00-24:00"),
    ],
)
def test_wrong_windows_are_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.yaml").write_text(f"queue: {{quiet_hours: ['{text}']}}")
    with pytest.raises(SpecError, match="quiet_hours") as caught:
        load(tmp_path / "config.yaml")
    assert told in str(caught.value) and "queue" in str(caught.value)


def test_names_of_quiet_devices_are_checked(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("queue: {quiet_devices: [gpu0]}")
    with pytest.raises(SpecError, match=r"queue.quiet_devices"):
        load(tmp_path / "config.yaml")
