"""What became of the figures that a run should come to, as `lorad show` is told: by the steps that count."""

from pathlib import Path

import pytest

from lorad.errors import SpecError
from lorad.records.runs import RunDetails
from tests.kit.daemon_world import ENDLESS, hold, release, serving

SPEC = """{trainer: {steps: 4}, expect: [
  {metric: reward, step: 2, low: 0.4, high: 0.6, source: a table},
  {metric: loss, step: 3, high: 0.01},
  {metric: grad_norm, step: 2, low: 0.0},
  {metric: reward, low: 0.4}]}"""


def outcomes(run: RunDetails) -> list[str]:
    return [one.outcome for one in run.expected]


async def test_a_run_says_what_it_came_to(home: Path) -> None:
    hold(home, "a@1")
    async with serving(home) as api:
        await api("run", SPEC, source="s", cwd="/", overrides=[], name="a")
        shown = await api.until("a", "running")
        assert outcomes(shown) == ["pending"] * 4 and shown.expected[3].step == 4
        release(home)
        shown = await api.until("a", "ended")
        assert outcomes(shown) == ["met", "missed", "missed", "met"]
        assert shown.expected[0].in_words == "reward met 0.500 at 2, expected 0.4 to 0.6 (a table)"


async def test_a_run_that_ended_before_reached_none(home: Path) -> None:
    async with serving(home) as api:
        await api("run", SPEC, source="s", cwd="/", overrides=[ENDLESS], name="a")
        await api.until("a", "running")
        await api("stop", "a")
        assert outcomes(await api.until("a", "ended"))[-1] == "not reached"


async def test_what_cannot_be_judged_starts_no_run(home: Path) -> None:
    async with serving(home) as api:
        with pytest.raises(SpecError, match=r"expect\[0\].step: the run ends before it, after 1 steps"):
            await api("run", SPEC, source="s", cwd="/", overrides=["trainer.steps=1"], name="a")
        assert await api("list") == []
