"""What `lorad run` prints while a run works."""

from typing import Any

import pytest

from lorad.cli import follow
from lorad.client.shapes import RunDetails, Step


def a_run(**more: Any) -> RunDetails:
    return RunDetails("a", "running", **{"step": 1, "steps": 3} | more)


def test_a_quiet_run_says_what_it_is_doing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("lorad.cli.follow.time.monotonic", lambda: now[0])
    view = follow._Lines()

    def said(seconds: float, doing: str, *steps: Step) -> list[str]:
        now[0] += seconds
        view.update(a_run(doing=doing), list(steps), [])
        return capsys.readouterr().err.splitlines()

    assert said(0, "sampling 0 of 64") == ["a: running"]
    assert said(9, "sampling 20 of 64") == []
    assert said(2, "sampling 41 of 64") == ["a: sampling 41 of 64"]
    assert said(11, "sampling 41 of 64") == []
    assert len(said(1, "training", Step(1, metrics={"tokens_per_second": 10.0}))) == 1
    assert said(9, "training") == [] and said(2, "training") == ["a: training"]
