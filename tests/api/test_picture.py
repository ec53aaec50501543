"""A run for people: a line of text, a bar and a curve."""

from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from lorad.api.picture import Curves, line, page, picture
from lorad.records.runs import Rates, RunDetails, Signals

RUN = RunDetails("<b>&amp", "running", step=3, steps=12, reward=0.5, rates=Rates(1000.0, 2.0))
DRAWN = Curves("reward", [(1, 0.0), (2, 1.0), (3, 0.5)], [(0, 0.25)])


def test_a_line_says_how_far_it_is() -> None:
    assert line(RUN) == "<b>&amp running 3/12 ━━━━━━────────────────── 25% reward 0.500 ETA 18s"


def test_the_eta_falls_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.client.columns.time.time", lambda: 1000.0)
    etas = [line(replace(RUN, signals=Signals(at=at))).rpartition(" ")[2] for at in (1000.0, 998.5, 900.0)]
    assert etas == ["18s", "16s", "16s"]  # eight steps of two seconds are left, however long this one takes


def test_when_a_client_stops_is_not_estimated() -> None:
    """`on_request`: its steps are made when a client asks for them."""
    assert "ETA" not in line(replace(RUN, signals=Signals(on_request=1.0)))


def test_names_are_text_in_a_page() -> None:
    root = ElementTree.fromstring(page(RUN, DRAWN))
    assert root.findtext("div/b") == "<b>&amp"


def test_a_curve_lies_where_its_values_are() -> None:
    (curve,) = ElementTree.fromstring(picture(DRAWN, 12)).iter("{http://www.w3.org/2000/svg}polyline")
    heights = [float(point.split(",")[1]) for point in curve.attrib["points"].split()]
    assert heights[1] < heights[2] < heights[0]  # the largest value is the topmost


def test_one_point_is_no_curve() -> None:
    assert picture(Curves("reward", DRAWN.steps[:1], []), 12) == ""


def test_equal_values_are_a_line() -> None:
    assert 'points="' in picture(Curves("loss", [(1, 0.5), (2, 0.5)], []), 2)


def test_why_a_run_failed_is_shown() -> None:
    failed = RunDetails("a", "ended", reason="failed", detail="the reward <raised>")
    assert "the reward &lt;raised&gt;" in page(failed, Curves("reward", [], []))
