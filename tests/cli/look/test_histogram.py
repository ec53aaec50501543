"""`lorad samples --histogram` and `lorad plot --histogram`: how amounts of samples of a step are spread."""

import csv
import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorad.cli.app import app
from lorad.client.client import Client
from lorad.client.histogram import bins, spread, spreads
from lorad.errors import LoradError, NotFound, SpecError
from lorad.records.samples import Sample
from tests.cli.test_many import Typed
from tests.cli.test_plot import typed
from tests.kit.frozen.world import frozen

__all__ = ["frozen", "typed"]

NUMBERS = st.floats(-1e6, 1e6) | st.integers(-1000, 1000)


@given(st.lists(NUMBERS))
def test_every_value_is_in_one_bin(values: list[float]) -> None:
    parts = bins(values)
    assert sum(part.count for part in parts) == len(values) and len(parts) <= 10
    if len({*values}) > 10:
        assert all(part.high == after.low for part, after in pairwise(parts))
    for part in parts[:-1]:
        inside = [value for value in values if part.low <= value < part.high or value == part.low]
        assert math.isclose(len(inside), part.count, abs_tol=2)  # an edge is rounded


def test_few_values_have_bins_of_their_own() -> None:
    assert [(part.low, part.count) for part in bins([1.0, 0.0, 1.0])] == [(0.0, 1), (1.0, 2)]
    assert bins([]) == []


def test_lengths_are_counted_in_whole_tokens() -> None:
    parts = bins(range(1, 26))
    assert [(part.low, part.high) for part in parts[:2]] == [(1, 4), (4, 7)]
    assert [part.count for part in parts] == [3] * 8 + [1]


def test_samples_without_reward_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Sample(1, reward=reward, length=4) for reward in (0.0, 1.0, 1.0, None, float("nan"))]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    monkeypatch.setattr(Client, "samples", lambda self, run, **of: rows)
    app(["samples", "a", "--histogram"], standalone_mode=False)
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1:] == [
        f"reward\t0\t0\t1\t{'█' * 15}",
        f"reward\t1\t1\t2\t{'█' * 30}",
        f"tokens\t4\t4\t5\t{'█' * 30}",
    ]
    assert "2 of 5 samples have no reward" in shown.err
    app(["samples", "a", "--histogram", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["unscored"] == 2
    assert spread([]).samples == 0


# -- lorad plot --histogram ----------------------------------------------------------------------------------
def test_runs_are_counted_in_the_same_bins() -> None:
    rows = [Sample(3, reward=number / 4, rewards={"judge": 1.0}) for number in range(5)]
    lost = [Sample(4, reward=reward) for reward in (None, float("nan"), 8.0, 9.0, 10.0, 11.0, 12.0, 20.0)]
    short, long = spreads({"short": rows, "long": lost}, "reward")
    assert [(part.low, part.high) for part in short.bins] == [(part.low, part.high) for part in long.bins]
    assert [part.count for part in short.bins] == [5, *[0] * 9]
    assert [part.count for part in long.bins] == [0, 0, 0, 0, 2, 2, 1, 0, 0, 1]
    assert (short.step, short.samples, short.counted, short.mean) == (3, 5, 5, 0.5)
    assert (long.samples, long.counted, long.mean) == (8, 6, 70 / 6)
    judged, unjudged = spreads({"short": rows, "long": lost}, "reward/judge")
    assert judged.bins[0].count == 5 and (unjudged.counted, unjudged.mean) == (0, None)


def test_plot_draws_bars_of_shares(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert typed("sorter", "--histogram", "-m", "reward").splitlines() == [
        "sorter: reward, 16 samples of step 42, mean 0.5625",
        f"0  {'█' * 28} 7",
        f"1  {'█' * 35} 9",
    ]
    assert typed("support-bot", "one-answer", "--histogram", "-m", "advantage").splitlines()[1:3] == [
        "A support-bot: 16 samples of step 312, mean 0",
        "B one-answer: 8 samples of step 88, mean 0.003333, 2 without",
    ]
    both = typed("one-answer", "sorter", "--histogram", "-m", "turns").splitlines()
    assert both[0] == "turns of an episode" and both[2] == "B sorter: 16 samples of step 42, mean 1"
    assert [len(line) for line in both if line.endswith(" 16")] == [40]
    assert f"2  A {'█' * 24} 6" in both  # of 8


def test_run_without_samples_is_named(typed: Typed) -> None:
    assert "No samples of waits.\n" in typed("waits", "sorter", "--histogram")
    of_step = typed("one-answer", "sorter", "--histogram", "-m", "turns", "--step", "41")
    assert "sorter: turns of an episode, 16 samples of step 41" in of_step
    assert "No samples of one-answer.\n" in of_step
    with pytest.raises(NotFound, match="000041"):
        typed("one-answer", "--histogram", "--step", "41")


@pytest.mark.system
def test_histograms_are_files_and_json(typed: Typed, tmp_path: Path) -> None:
    runs = ("sorter", "support-bot", "--histogram")
    counted = json.loads(typed(*runs, "--json"))
    assert [(row["run"], row["metric"]) for row in counted] == [
        *(("sorter", "reward"), ("support-bot", "reward"), ("sorter", "length"), ("support-bot", "length"))
    ]
    typed(*runs, "-o", str(tmp_path / "a.csv"))
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [int(row["count"]) for row in rows] == [part["count"] for row in counted for part in row["bins"]]
    typed(*runs, "-o", str(tmp_path / "a.svg"), "-m", "reward")
    picture = ElementTree.parse(tmp_path / "a.svg").getroot()
    drawn = [part for part in picture.iter() if part.get("fill", "").startswith("#")]
    bars = [float(part.get("height", "")) for part in drawn]
    assert min(float(part.get("y", "")) for part in drawn) == 30.0  # the longest fills the chart
    parts = [part["count"] for row in counted[:2] for part in row["bins"]]
    assert [round(bar / max(bars), 2) for bar in bars] == [round(part / max(parts), 2) for part in parts]
    assert "reward: share of the samples" in "".join(picture.itertext())
    typed(*runs, "-o", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("--histogram", "-m", "kl"), SpecError, "samples have no kl"),
        (("--histogram", "-m", "reward/judge"), NotFound, "no sample of sorter has a reward/judge"),
        (("--histogram", "--smooth", "0.6"), SpecError, "--smooth, --log and --best are of curves"),
        (("--histogram", "--x", "time"), SpecError, "--x, --smooth"),
        (("--histogram", "-o", "a.gif"), SpecError, "ends with none of"),
        (("--step", "3"), SpecError, "--step is of histograms"),
    ],
)
def test_histograms_refuse_what_curves_have(
    words: tuple[str, ...], error: type[LoradError], says: str, typed: Typed
) -> None:
    with pytest.raises(error) as raised:
        typed("sorter", *words)
    assert says in raised.value.message
