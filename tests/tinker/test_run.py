"""A model of Tinker is a run of the daemon as any other: started, killed, parked, resumed."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lorad.tinker.lane.state import REQUESTS
from lorad.tinker.log import LogWriter
from lorad.tinker.records import Arguments, Request
from lorad.tui.dashboard.run_rows import cells
from tests.kit.world import World, world
from tests.tinker.lane_kit import SPEC, results_in, same, script, tensors_in

STEPS = 8
LAST = 3 * STEPS + 1
LASTING = SPEC + "resources: {restart: on-failure, max_restarts: 1000}\n"


@pytest.fixture(scope="module")
def box() -> Iterator[World]:
    with world() as made:
        yield made


def ask(made: World, name: str, wanted: list[Arguments], first: int = 0) -> None:
    with LogWriter(made.home.run(name).root / REQUESTS) as log:
        for seq, arguments in enumerate(wanted, first):
            log.append(Request(seq, time.time(), str(seq), arguments))


def start(made: World, name: str, wanted: list[Arguments]) -> None:
    made.lorad("run", made.spec(LASTING), "--name", name, "--detach")
    (made.home.run(name).root / REQUESTS).parent.mkdir(exist_ok=True)
    ask(made, name, wanted)


def told(made: World, name: str, last: int = LAST) -> dict[int, Any]:
    """The results, once there is one of the request `last`."""
    root = made.home.run(name).root
    made.until(lambda: last in results_in(root), f"{name} told {last}")
    return results_in(root)


@pytest.fixture(scope="module")
def calm(box: World) -> World:
    start(box, "calm", [*script(STEPS)])
    told(box, "calm")
    return box


def assert_same(made: World, name: str) -> None:
    expected, found = results_in(made.home.run("calm").root), told(made, name)
    assert [seq for seq in expected if not same(found[seq], expected[seq])] == []
    assert same(tensors_in(made.home.run(name).root), tensors_in(made.home.run("calm").root))


@pytest.mark.system
def test_steps_are_seen_as_those_of_any_run(calm: World) -> None:
    calm.reached("calm", STEPS)
    shown = calm.client.show("calm")
    assert (shown.state, shown.step, shown.version) == ("running", STEPS, None)
    assert calm.client.steps("calm")[0].metrics["lr"] == 1e-3
    assert "calm" in calm.lorad("list").stdout and "loss" in calm.lorad("plot", "calm", "-m", "loss").stdout
    assert [row.step for row in calm.client.checkpoints("calm")][-1] == 6
    calm.lorad("verify", "calm")
    assert not [warning for warning in shown.warnings if "free" in warning] and shown.files is None


def test_steps_without_a_planned_end_are_a_count(calm: World) -> None:
    calm.reached("calm", STEPS)
    shown = calm.client.show("calm")
    (row,) = [line for line in calm.lorad("list").stdout.splitlines() if "calm" in line]
    assert (shown.steps, row.split()[:3]) == (0, ["calm", "running", "8"])
    assert ["step", "8"] in [line.split() for line in calm.lorad("show", "calm").stdout.splitlines()]
    on_the_dashboard = cells(shown, columns=["step", "progress"])
    assert {name: text.plain for name, text in on_the_dashboard.items()} == {"step": "8", "progress": ""}


@pytest.mark.system
@pytest.mark.parametrize("victim", ["driver", "pool"])
def test_a_death_changes_nothing_that_is_told(calm: World, victim: str) -> None:
    name = f"struck-{victim}"
    start(calm, name, [*script(STEPS)])
    told(calm, name, 10)
    os.kill(calm.pid(name, victim), signal.SIGKILL)
    assert_same(calm, name)
    calm.reached(name, STEPS)
    assert [step.step for step in calm.client.steps(name)] == [*range(1, STEPS + 1)]


@pytest.mark.system
def test_a_parked_model_goes_on_when_resumed(calm: World) -> None:
    """A pause between the passes of a step gives the slot back."""
    wanted = [*script(STEPS)]
    start(calm, "parked", wanted[:12])
    told(calm, "parked", 11)
    calm.lorad("pause", "parked", "--wait")
    assert calm.client.show("parked").state == "paused"
    ask(calm, "parked", wanted[12:], 12)
    calm.lorad("resume", "parked", "--detach")
    assert_same(calm, "parked")
    calm.lorad("stop", "parked", "--wait")
    assert calm.client.show("parked").reason == "stopped"
