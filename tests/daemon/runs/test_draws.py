"""Points of a sweep that are drawn by a seed, or come from a file."""

from pathlib import Path

import pytest

from lorad.cli.points import points_in
from lorad.daemon.runs.draws import axes_of, distributions_of, draw_points, listed_points
from lorad.errors import SpecError
from lorad.records.requests import PointsRequest
from lorad.spec.text import load_spec
from tests.kit.daemon_world import SPEC, serving

DRAWN = [
    *("trainer.lr=loguniform(1e-5,1e-3)", "lora.rank=choice(8, 16,32)"),
    *("seed=int(1,9)", "trainer.steps=logint(2,500)"),
]


def points(count: int, seed: int, *overrides: str) -> list[dict[str, str]]:
    found, _ = distributions_of(overrides or DRAWN)
    return [dict(text.split("=") for text in point) for point in draw_points(found, count, seed)]


def test_same_seed_draws_the_same_points() -> None:
    assert points(12, 0) == points(12, 0) != points(12, 1)
    alone = points(12, 0, DRAWN[0])
    assert [point["trainer.lr"] for point in points(12, 0)] == [point["trainer.lr"] for point in alone]


def test_draws_are_within_bounds_and_spread() -> None:
    found = points(200, 0)
    rates = sorted(float(point["trainer.lr"]) for point in found)
    assert 1e-5 <= rates[0] < 2e-5 and 5e-4 < rates[-1] <= 1e-3
    assert 0.4 < sum(rate < 1e-4 for rate in rates) / 200 < 0.6  # half of the decades
    assert {point["lora.rank"] for point in found} == {"8", "16", "32"}
    assert {point["seed"] for point in found} == {str(number) for number in range(1, 10)}
    steps = [int(point["trainer.steps"]) for point in found]
    assert min(steps) >= 2 and max(steps) <= 500 and sum(step < 32 for step in steps) > 70


@pytest.mark.parametrize(
    ("override", "count", "says"),
    [
        ("trainer.lr=loguniform(0,1)", 3, "above 0"),
        ("trainer.lr=uniform(2,1)", 3, "a lower and a higher number"),
        ("trainer.lr=uniform(1)", 3, "takes two numbers"),
        ("seed=int(1,2.5)", 3, "two whole numbers"),
        ("seed=1,2", 3, "hardly more than 2 different points"),
        ("seed=1", 3, "no key is drawn"),
        ("seed=int(1,1000)", 300, "not 1 to 256 points"),
        ("name=choice(a,b)", 2, "names from"),
    ],
)
def test_draws_that_cannot_be_are_refused(override: str, count: int, says: str) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        points(count, 0, override)
    assert refused.value.hint


def test_a_grid_takes_choices_and_no_distributions() -> None:
    assert axes_of(["lora.rank=choice(8,16)", "seed=1,2"])[0] == {
        "lora.rank": ["8", "16"],
        "seed": ["1", "2"],
    }
    with pytest.raises(SpecError, match="has no list of values") as refused:
        axes_of(["trainer.lr=uniform(0,1)"])
    assert "--random" in refused.value.hint


def test_given_points_may_differ_in_their_keys() -> None:
    axes, found = listed_points([["seed=1", "lora.rank=4"], ["seed=2"]])
    assert axes == {"seed": ["1", "2"], "lora.rank": ["4"]} and found[1] == ["seed=2"]
    with pytest.raises(SpecError, match="point 1"):
        listed_points([["seed=1", "seed=2"]])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.csv", "trainer.lr,data.train\n1e-4,sort\n,reverse\n"),
        ("p.json", '[{"trainer.lr": 1e-4, "data": {"train": "sort"}}, {"data.train": "reverse"}]'),
        ("p.yaml", "- {trainer.lr: 1e-4, data.train: sort}\n- data: {train: reverse}\n"),
    ],
)
def test_points_come_from_files(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    specs = [load_spec("", overrides=point) for point in points_in(str(tmp_path / name))]
    assert [(spec.trainer.lr, spec.data.train) for spec in specs] == [(1e-4, "sort"), (None, "reverse")]


@pytest.mark.parametrize("text", ["", "a,,c\n1,2,3\n", "trainer.lr\n1,2\n", "trainer.lr\n"])
def test_a_file_without_points_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(SpecError, match=r"p\.csv"):
        points_in(str(tmp_path / "p.csv"))


async def test_drawn_points_run_as_a_sweep(home: Path) -> None:
    async with serving(home) as api:
        wanted = PointsRequest(random=3, seed=5)
        overrides = [DRAWN[0], "lora.rank=4"]
        options = {"source": "a", "cwd": "/", "overrides": overrides, "name": "s", "halving": None}
        made = await api("sweep", SPEC, **options, points=wanted)
        assert made.grid == {"trainer.lr": ["loguniform(1e-5,1e-3)"]}
        rates = [float(point["trainer.lr"]) for point in points(3, 5, DRAWN[0])]
        assert [run.values["trainer.lr"] for run in made.runs] == rates
        assert (await api("show", "s-2")).spec["lora"]["rank"] == 4
        listed = PointsRequest(listed=[["seed=3"], ["seed=4", "trainer.lr=1e-3"]])
        made = await api("sweep", SPEC, **options | {"overrides": [], "name": "t"}, points=listed)
        assert [run.values for run in made.runs][1] == {"seed": 4, "trainer.lr": 1e-3}
