"""`lorad samples --histogram`: how rewards and lengths of a step are spread."""

import json
import math
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorad.cli.app import app
from lorad.client.client import Client
from lorad.client.histogram import bins, spread
from lorad.records.samples import Sample

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
