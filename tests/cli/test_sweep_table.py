"""The table of a sweep at widths of terminals, into a pipe, as Markdown and as JSON."""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from msgspec import structs

from lorad.cli.parallel import lines, picture
from lorad.cli.sweeps import ranked, show
from lorad.records.runs import Signals
from lorad.records.sweeps import Halving, Rung, Sweep, SweepRun

KEPT = Path(__file__).parents[1] / "data/tables/sweep.txt"


def member(number: int, lr: float, rank: int, score: float | None, reward: float, **more: Any) -> SweepRun:
    usual: dict[str, Any] = {"reason": "completed", "step": 60, "eval_last": score, "eval_best": score}
    usual |= {"state": "ended", "steps": 60, "started_at": 100.0, "ended_at": 174.0, "reward_mean": reward}
    values = {"trainer.lr": lr, "lora.rank": rank}
    return SweepRun(**{"name": f"sort-{number}", "values": values, **usual, **more})


SWEEP = Sweep(
    "sort",
    grid={"trainer.lr": ["1e-4", "1e-3", "1e-2"], "lora.rank": ["8", "32"]},
    runs=[
        member(1, 1e-4, 8, 0.414, 0.4012),
        member(2, 1e-4, 32, 0.4453, 0.4219),
        member(3, 1e-3, 8, 0.961, 0.9531, eval_best=0.9766),
        member(4, 1e-3, 32, 0.973, 0.9688),
        member(5, 1e-2, 8, 0.992, 0.1, reason="failed", step=22, detail="the loss was not finite 3 times"),
        member(6, 1e-2, 32, None, 0.2, reason="stopped", step=7, detail="stopped by ann"),
    ],
)


def shown(width: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: width is not None)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    show([SWEEP], in_full=True, as_json=False, markdown=width == 0)
    return capsys.readouterr().out


def test_a_sweeps_table_is_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    forms = {"60": 60, "80": 80, "140": 140, "piped": None, "markdown": 0}
    text = "\n".join(f"== {name}\n{shown(width, monkeypatch, capsys)}" for name, width in forms.items())
    if request.config.getoption("update_snapshots"):
        KEPT.write_text(text)
    assert text == KEPT.read_text()


def test_completions_are_ranked_by_their_likelihood(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        SweepRun(f"t-{number}", state="ended", reason="completed", nll_last=nll, loss_mean=2.0)
        for number, nll in enumerate((0.9, 0.4, 1.5), 1)
    ]
    rung = Rung(2, scores={"t-1": 0.9, "t-2": 0.4})
    sweep = Sweep("t", runs=runs, halving=Halving(2, [2], "nll"), rungs=[rung])
    assert [run.name for run in ranked(sweep)] == ["t-2", "t-1", "t-3"]
    show([sweep], in_full=True, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert "nll" in lines[0] and "loss" in lines[0] and "reward" not in lines[0]
    (decided,) = (line for line in lines if line.startswith("step 2"))
    assert "0.4" in decided and "0.9" not in decided


def test_runs_that_trained_nothing_are_never_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    def swept(name: str, score: float, idle: float) -> SweepRun:
        signals = Signals(idle_steps_total=idle)
        return SweepRun(name, "ended", "completed", step=4, steps=4, eval_last=score, signals=signals)

    show([Sweep("s", runs=[swept("s-1", 0.9, 4), swept("s-2", 0.2, 1)])], in_full=False, as_json=False)
    assert "s-2" in capsys.readouterr().out
    show([Sweep("s", runs=[swept("s-1", 0.9, 4)])], in_full=False, as_json=False)
    assert "s-1" not in capsys.readouterr().out


def test_the_best_is_first_and_failures_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert [run.name[-1] for run in ranked(SWEEP)] == ["4", "3", "2", "1", "6", "5"]
    show([SWEEP], in_full=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["runs"][0]["name"] == "sort-4"


def test_picture_marks_the_best_run() -> None:
    head, *rows, best = lines(SWEEP, ranked(SWEEP), 80)
    assert head.split() == ["trainer.lr", "lora.rank", "eval"] and best == "━ sort-4 is the best"
    assert all(len(row) <= 80 for row in rows) and "0.992" in rows[0] and "0.01" in rows[0]
    assert rows[6].startswith("│0.001")  # half way, by its logarithm
    assert rows[5].startswith("│   ━") and "│32━" in rows[0] and "━" not in "".join(rows[6:])
    alone = structs.replace(SWEEP, runs=SWEEP.runs[:1])
    assert lines(alone, alone.runs, 80) == []


def test_svg_has_a_line_for_each_run() -> None:
    root = ElementTree.fromstring(picture(SWEEP, ranked(SWEEP)))
    found = [line.attrib["points"].split() for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert sorted(map(len, found)) == [2, 3, 3, 3, 3, 3]  # one has no score
    names = {title.text for title in root.iter("{http://www.w3.org/2000/svg}title")}
    assert names == {run.name for run in SWEEP.runs}
