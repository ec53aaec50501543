"""Runs that really ran: their logs by lines, attempts and processes, compared, and attached to."""

from collections.abc import Iterator

import pytest

from tests.kit.world import World, world


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    """Two runs that are over; `a` has two attempts."""
    with world() as it:
        it.run("a", "trainer.steps=2")
        it.run("b", "trainer.steps=2", "seed=7")
        it.lorad("resume", "a", "trainer.lr=3e-4", "--steps", 3, "--wait")
        yield it


@pytest.mark.system
def test_the_last_lines_and_earlier_attempts_are_shown(made: World) -> None:
    newest = made.lorad("logs", "a").stdout.splitlines()
    assert made.lorad("logs", "a", "-n", 2).stdout.splitlines() == newest[-2:]
    assert made.lorad("logs", "a", "--attempt", 2).stdout.splitlines() == newest
    first = made.lorad("logs", "a", "--attempt", 1, "-n", 1).stdout
    assert "2 of 2 steps" in first and "3 of 3 steps" in newest[-1]
    assert "has no attempt 3" in made.lorad("logs", "a", "--attempt", 3, expect=3).stderr
    assert "by attempts" in made.lorad("logs", "a", "--attempt", 1, "--of", "pool", expect=2).stderr
    assert "--all" in made.lorad("logs", "a", "--all", "--of", "pool", expect=2).stderr


@pytest.mark.system
def test_all_processes_are_shown_with_their_names(made: World) -> None:
    lines = made.lorad("logs", "a", "--all", "-f").stdout.splitlines()
    processes = {line.partition(" |")[0].strip() for line in lines}
    assert processes == {"driver", "pool"}  # the builtin pool is one process with one log
    driver = [line.partition("| ")[2] for line in lines if line.startswith("driver")]
    assert driver == made.lorad("logs", "a").stdout.splitlines()
    assert set(made.json("logs", "a", "--all")) == processes


@pytest.mark.system
def test_two_runs_are_compared_by_their_beginnings(made: World) -> None:
    found = made.json("diff", "a", "b")
    assert set(found["spec"]) == {"seed", "trainer.steps", "trainer.lr"}
    assert found["changed"]["trainer.lr"][0][1] == [2, 3e-4] and len(found["changed"]["trainer.lr"][1]) == 1
    assert found["spec"]["trainer.steps"] == [3, 2]
    assert "model" in found["same"]["inputs"] and {"lorad", "torch"} <= {*found["same"]["software"]}
    assert [point["step"] for point in found["curves"]] == [1, 2]


def test_attaching_shows_how_a_run_ended(made: World) -> None:
    assert "b ended (completed) at step 2 of 2" in made.lorad("attach", "b").stderr
    assert made.json("attach", "b")["reason"] == "completed"
    made.lorad("attach", "nobody", expect=3)
