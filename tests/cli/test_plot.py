"""lorad plot: the dashboard's charts in the terminal, as JSON and as files, on a world that does not move."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lorad.cli.app import app
from lorad.cli.commands.plot import _refuse_missing, tracks_of, usual_metric
from lorad.client.client import Client
from lorad.client.transport import Json
from lorad.errors import LoradError, NotFound, SpecError
from lorad.records.runs import Run
from tests.cli.test_many import Typed
from tests.kit.frozen.world import frozen
from tests.kit.tui_world import Prepared, World, a_run, shaped
from tests.tui.test_curves import serve, step

__all__ = ["frozen"]


@pytest.fixture
def typed(frozen: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """What `lorad plot …` prints, on stdout and then on stderr."""
    monkeypatch.setenv("LORAD_HOME", str(frozen.home.root))

    def run(*arguments: str) -> str:
        app(["plot", *arguments], standalone_mode=False)
        return "".join(capsys.readouterr())

    return run


def test_each_metric_has_a_chart(typed: Typed) -> None:
    lines = typed("sorter", "-m", "reward", "-m", "kl", "-m", "reward").splitlines()
    assert [line for line in lines if line.startswith("sorter: ")] == [
        "sorter: reward, by step",
        "sorter: KL to the reference, nats per token, by step",
    ]


def test_title_says_smoothing_axis_and_best(typed: Typed) -> None:
    title = typed("sorter", "--x", "tokens", "--smooth", "0.6", "--best").splitlines()[0]
    assert title == "sorter: reward, by tokens sampled; ema 0.6; ★ 0.870 at 47.23k"


def test_globs_choose_runs_and_names_keep_their_order(typed: Typed) -> None:
    assert typed("support-bot", "sorter", "-m", "kl").splitlines()[-2:] == [
        "A ────── support-bot",
        "B ─── ── sorter",
    ]
    assert {row["run"] for row in json.loads(typed("sorter*", "--json"))} == {"sorter", "sorter-hot"}


def test_json_has_x_and_smoothed_values(typed: Typed) -> None:
    (row,) = json.loads(typed("sorter", "--x", "time", "--smooth", "0.9", "--json"))
    assert [*row] == ["run", "metric", "step", "time", "value", "smoothed"]
    assert row["step"][:2] == [1, 2] and row["time"][:2] == [1.093, 2.293] and len(row["smoothed"]) == 42


@pytest.mark.system
def test_json_has_every_step_of_a_long_run(typed: Typed, frozen: Client) -> None:
    (row,) = json.loads(typed("million", "--json"))
    assert row["step"] == [step.step for step in frozen.steps("million")] and len(row["step"]) == 7840


def test_file_has_the_values_of_json(typed: Typed, tmp_path: Path) -> None:
    assert "Written to" in typed("sorter", "-m", "eval", "-o", str(tmp_path / "a.csv"))
    (row,) = json.loads(typed("sorter", "-m", "eval", "--json"))
    found = [*csv.DictReader((tmp_path / "a.csv").read_text().splitlines())]
    assert [float(line["value"]) for line in found] == row["value"]


def test_run_without_the_metric_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(a_run("a"), a_run("b"))
    serve(world, "a", lambda: 3, lambda number: step(number, cost=1.0))
    serve(world, "b", lambda: 3)
    runs = [shaped(Run, a_run("a")), shaped(Run, a_run("b"))]
    tracks = tracks_of(Client(transport=Prepared(world)), runs, whole=False)
    _refuse_missing(tracks, ["cost"])
    assert tracks["a"].of("cost").xs
    assert capsys.readouterr().err == "No cost in b.\n"


def without_reward(number: int) -> Json:
    made = step(number)
    del made["metrics"]["reward"]
    return made


@pytest.mark.parametrize(
    ("steps", "make", "usual"), [(3, step, "reward"), (3, without_reward, "loss"), (0, step, "reward")]
)
def test_the_usual_curve_is_of_what_there_is(steps: int, make: Callable[[int], Json], usual: str) -> None:
    world = World(a_run("a"))
    serve(world, "a", lambda: steps, make)
    tracks = tracks_of(Client(transport=Prepared(world)), [shaped(Run, a_run("a"))], whole=False)
    assert usual_metric(tracks) == usual


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        (("sorter", "-m", "magic"), NotFound, "sorter: no metric magic"),
        (("sorter", "gone"), NotFound, "no run named gone"),
        (("--tag", "of-no-run"), NotFound, "no run is like that"),
        ((), SpecError, "no run was named"),
        (("gone", "-o", "a.gif"), SpecError, "ends with none of .png, .svg, .csv"),
        (("gone", "-o", "/nowhere/a.csv"), SpecError, "no directory /nowhere"),
    ],
)
def test_mistakes_are_refused(
    arguments: tuple[str, ...], error: type[LoradError], told: str, typed: Typed
) -> None:
    with pytest.raises(error) as raised:
        typed(*arguments)
    assert told in raised.value.message
