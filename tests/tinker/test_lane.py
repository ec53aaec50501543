"""The lane of a model in a real pool: results, failures, and deaths that change nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from lorad.protocol.calls import LoadVersion, Rank
from lorad.protocol.connection import Connection
from lorad.protocol.nodes import PlacedNode
from lorad.tinker.lane import state
from lorad.tinker.lane.state import REQUESTS
from lorad.tinker.log import LogWriter
from lorad.tinker.records import (
    Arguments,
    Create,
    Created,
    Failed,
    Load,
    Loaded,
    Passed,
    Published,
    Refused,
    Saved,
    SaveSampler,
    SaveWeights,
    Step,
    Stepped,
    Unload,
)
from tests.kit.pool_kit import Running
from tests.tinker.lane_kit import STEP, LaneRun, pass_of, same, script

pytest_plugins = ["tests.kit.pool_fixtures"]

STEPS = 7
LAST = 3 * STEPS + 1


@pytest.fixture(scope="module")
def calm(running: Running, tmp_path_factory: pytest.TempPathFactory) -> LaneRun:
    made = LaneRun(running, tmp_path_factory.mktemp("calm"), "calm")
    made.ask(*script(STEPS))
    assert made.serve(LAST).reason == "stopped"
    return made


def test_requests_are_done_in_order(calm: LaneRun) -> None:
    told = calm.told()
    assert list(told) == list(range(LAST + 1))
    assert isinstance(told[0], Created) and isinstance(told[LAST], Saved)
    assert isinstance(told[1], Passed) and told[1].logprobs.dtype == np.float32
    losses = [outcome.metrics["loss:sum"] for outcome in told.values() if isinstance(outcome, Passed)]
    assert len({round(loss, 6) for loss in losses}) == len(losses)
    assert all(o.metrics["grad_norm"] > 0 for o in told.values() if isinstance(o, Stepped))


def test_steps_are_facts_of_the_run(calm: LaneRun) -> None:
    steps = calm.facts("step")
    assert [fact.step for fact in steps] == [*range(1, STEPS + 1)]
    assert {"loss", "lr", "grad_norm", "trained_tokens"} <= steps[0].data["metrics"].keys()
    assert [fact.data["position"] for fact in steps] == [6 * n for n in range(STEPS)]
    assert [fact.step for fact in calm.facts("checkpoint")] == [3, 6, 7]


@pytest.mark.system(but=["3", "15"])
@pytest.mark.parametrize("last", [1, 3, 11, 15])
def test_a_killed_lane_tells_what_others_do(
    calm: LaneRun, running: Running, tmp_path: Path, last: int
) -> None:
    """Every result, the weights and Adam's moments, bit for bit; each step is a fact once."""
    made = LaneRun(running, tmp_path, f"struck-{last}")
    made.ask(*script(STEPS))
    made.struck(last)
    before = made.told()
    assert last <= max(before) < LAST
    made.serve(LAST)
    told, expected = made.told(), calm.told()
    assert all(same(told[seq], before[seq]) for seq in before)
    assert [seq for seq in expected if not same(told[seq], expected[seq])] == []
    assert same(made.tensors(), calm.tensors())
    assert [fact.step for fact in made.facts("step")] == [*range(1, STEPS + 1)]


@pytest.mark.system
def test_parking_between_passes_changes_nothing(calm: LaneRun, running: Running, tmp_path: Path) -> None:
    """Passes whose results were written are done again, for their gradients."""
    made, wanted = LaneRun(running, tmp_path, "parked"), [*script(STEPS)]
    for last in (2, 4, 13, LAST):
        first = len(made.told()) if made.run.journal.exists() else 0
        made.ask(*wanted[first : last + 1], first=first)
        assert made.serve(last).reason == "stopped"
    assert same(made.tensors(), calm.tensors())
    assert all(same(made.told()[seq], calm.told()[seq]) for seq in calm.told())


def test_requests_that_come_out_of_order_wait(calm: LaneRun, running: Running, tmp_path: Path) -> None:
    made, wanted = LaneRun(running, tmp_path, "shuffled"), [*script(STEPS)]
    made.ask(*wanted[5:], first=5)
    made.ask(*wanted[:5])
    made.ask(*wanted[2:4], first=2)  # again
    made.serve(LAST)
    assert same(made.tensors(), calm.tensors())


def test_a_failed_pass_fails_its_step(running: Running, tmp_path: Path) -> None:
    """The gradients go; the step after it is as if neither had been asked for. Also after a death."""
    made = LaneRun(running, tmp_path, "poisoned")
    bad = pass_of(1)
    bad.targets[0] = 10**6
    wanted = (Create(), pass_of(0), bad, STEP, pass_of(2), STEP, SaveWeights("end"))
    made.ask(*wanted)
    made.struck(3)
    made.serve(6)
    told = made.told()
    assert isinstance(told[2], Failed) and told[2].category == "user" and "labels" in told[2].message
    assert isinstance(told[3], Failed) and "request 2 failed" in told[3].message
    alone = LaneRun(running, tmp_path, "unpoisoned")
    alone.ask(Create(), pass_of(2), STEP, SaveWeights("end"))
    alone.serve(3)
    assert same(made.tensors(), alone.tensors())
    assert [fact.step for fact in made.facts("step")] == [1]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Step(learning_rate=float("nan")), "not finite"),
        (Step(learning_rate=1e-3, beta1=1.0), "beta"),
        (Refused("images are not supported"), "images"),
        (SaveWeights("../up"), "no name"),
        (Load("tinker://x/weights/y", "/nowhere", optimizer=True), "nowhere"),
    ],
)
def test_what_cannot_be_done_fails_its_future(
    running: Running, tmp_path: Path, wanted: Arguments, words: str
) -> None:
    """The model trains on after it."""
    made = LaneRun(running, tmp_path, f"refused-{abs(hash(words)) % 10**6}")
    made.ask(Create(), pass_of(0), STEP, wanted, pass_of(1), STEP, pass_of(2), STEP)
    assert made.serve(7).reason == "stopped"
    told = made.told()
    assert isinstance(told[3], Failed) and words in told[3].message
    assert isinstance(told[7], Stepped)


@pytest.mark.system
def test_a_failed_load_fails_the_step_it_leaves(running: Running, tmp_path: Path) -> None:
    """The gradients of the pass before it are gone. Also after a death."""
    made = LaneRun(running, tmp_path, "unloadable")
    load = Load("tinker://x/weights/y", "/nowhere")
    made.ask(Create(), pass_of(0), load, STEP, pass_of(2), STEP, SaveWeights("end"))
    made.struck(2)
    made.serve(6)
    told = made.told()
    assert isinstance(told[3], Failed) and "request 2 failed" in told[3].message
    alone = LaneRun(running, tmp_path, "loadable")
    alone.ask(Create(), load, pass_of(2), STEP, SaveWeights("end"))
    alone.serve(4)
    assert same(made.tensors(), alone.tensors())


def test_a_forward_pass_has_the_numbers_without_gradients(running: Running, tmp_path: Path) -> None:
    made = LaneRun(running, tmp_path, "forward")
    made.ask(Create(), pass_of(0, "ppo", backward=False), pass_of(0, "ppo"), STEP, SaveWeights("end"))
    made.serve(4)
    scored, trained = made.told()[1], made.told()[2]
    assert isinstance(scored, Passed) and isinstance(trained, Passed)
    np.testing.assert_allclose(scored.logprobs, trained.logprobs, atol=1e-5)
    assert scored.metrics["loss:sum"] == pytest.approx(trained.metrics["loss:sum"], rel=1e-4)


def test_a_published_version_is_served_from_its_files(running: Running, tmp_path: Path) -> None:
    made = LaneRun(running, tmp_path, "published")
    made.ask(Create(), pass_of(0), STEP, SaveSampler("first"), pass_of(1), STEP, SaveSampler())
    made.serve(6)
    first, second = made.told()[3], made.told()[6]
    assert isinstance(first, Published) and isinstance(second, Published)
    assert (first.version, second.version, first.name) == (0, 1, "first")
    texts = [np.arange(5, 12, dtype=np.int32)]
    with running.connect() as connection:
        scores = []
        for one in (first, second):
            name = f"published@{one.version}"
            connection.call("load_version", LoadVersion(name, str(made.run.root / one.directory), one.sha256))
            scores.append(connection.call("rank", Rank(name, texts, [1], 0)).logprobs)
    assert not np.array_equal(*scores)


@pytest.mark.system
def test_versions_after_a_checkpoint_stay_parents(running: Running, tmp_path: Path) -> None:
    """What was published before a death is not published again, and the next version follows it."""
    made = LaneRun(running, tmp_path, "parents")
    steps = 2 * (pass_of(0), STEP)
    made.ask(Create(), SaveSampler(), *steps, SaveSampler(), *steps, SaveSampler(), SaveSampler())
    for last in (6, 11):
        made.struck(last)
    made.ask(SaveSampler(), first=13)
    made.serve(13)
    versions = [fact.data for fact in made.facts("version")]
    assert [told.version for told in made.told().values() if isinstance(told, Published)] == [
        fact["version"] for fact in versions
    ]
    assert [fact["parent"] for fact in versions] == [None, *(fact["version"] for fact in versions[:-1])]


@pytest.mark.parametrize("optimizer", [True, False])
def test_weights_are_loaded_with_the_optimizer_or_without(
    running: Running, tmp_path: Path, *, optimizer: bool
) -> None:
    """With its state the next step is that of the model that was saved; without, another one."""
    made = LaneRun(running, tmp_path, f"saved-{optimizer}")
    made.ask(Create(), pass_of(0), STEP, SaveWeights("half"), pass_of(1), STEP, SaveWeights("end"))
    made.serve(6)
    source = str(made.run.root / "tinker" / "weights" / "half")
    made_of = {
        "created": (Create(source, optimizer), pass_of(1), STEP, SaveWeights("end")),
        "loaded": (
            *(Create(), pass_of(7), STEP, Load("tinker://x", source, optimizer)),
            *(pass_of(1), STEP, SaveWeights("end")),
        ),
    }
    for name, wanted in made_of.items():
        other = LaneRun(running, tmp_path, f"{name}-{optimizer}")
        other.ask(*wanted)
        other.serve(len(wanted) - 1)
        assert isinstance(other.told()[len(wanted) - 4], Created | Loaded)
        assert same(other.tensors(), made.tensors()) == optimizer
        assert same(other.tensors().keys(), made.tensors().keys())


def test_the_journal_names_the_nodes(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, node = Connection.call, PlacedNode(node="h1", boot_id="b")

    def spread(self: Connection, name: str, *arguments: Any, **more: Any) -> Any:
        found = call(self, name, *arguments, **more)
        return replace(found, nodes=(node,)) if name == "hello" else found

    monkeypatch.setattr(Connection, "call", spread)
    made = LaneRun(running, tmp_path, "placed")
    made.ask(Create())
    made.serve(0)
    (placed,) = made.facts("placed")
    assert (placed.data["nodes"][0]["node"], placed.data["ranks"]) == ("h1", 1)


def test_an_unloaded_model_is_completed(running: Running, tmp_path: Path) -> None:
    made = LaneRun(running, tmp_path, "unloaded")
    made.ask(Create(), pass_of(0), STEP, Unload())
    end = made.serve(3)
    assert (end.reason, made.facts("checkpoint")[-1].step) == ("completed", 1)


def test_requests_that_are_gone_end_the_attempt(running: Running, tmp_path: Path) -> None:
    """A checkpoint before the one whose requests the door has dropped cannot be continued from."""
    made = LaneRun(running, tmp_path, "gone")
    made.ask(*script(4))
    made.serve(13)
    for path in (made.run.root / "tinker" / "requests").glob("*.log"):
        path.unlink()
    for path in made.run.checkpoints.iterdir():
        path.rename(path.with_name(f"away-{path.name}"))
    end = made.serve(99)
    assert end.reason == "failed" and "requests 0 to 12 are gone" in end.detail


def test_a_run_of_days_fills_no_disk(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results go that are old, in a checkpoint, and whose requests the door dropped."""
    monkeypatch.setitem(LogWriter.__init__.__kwdefaults__ or {}, "segment", 1)
    monkeypatch.setattr(state, "_KEPT", -1.0)
    made = LaneRun(running, tmp_path, "long")
    made.ask(*script(3))
    made.serve(10)
    assert len(made.told()) == 11
    with LogWriter(made.run.root / REQUESTS) as requests:
        requests.drop(before=10)
    made.ask(pass_of(9), STEP, first=11)
    made.serve(12)
    assert [*made.told()] == [10, 11, 12]
