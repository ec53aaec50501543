"""`lorad.connect()` and its handles, sync and async, against one real daemon."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import lorad
from lorad.protocol.listener import answers
from tests.kit.daemon_world import until
from tests.kit.world import World, world

SPEC: dict[str, Any] = {
    "algorithm": {"group_size": 4},
    "data": {"train": "sort", "eval": "sort", "prompts_per_step": 2},
    "trainer": {"lr": 2e-3, "steps": 4},
    "rollout": {"max_new_tokens": 6},
    "eval": {"every": 2, "problems": 4},
    "checkpoint": {"every": 2},
}


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as one:
        yield one


@pytest.fixture(scope="module")
def box(made: World) -> lorad.Lorad:
    return lorad.connect(made.home.root)


@pytest.fixture(scope="module")
def done(box: lorad.Lorad) -> lorad.Run:
    run = box.run(SPEC, name="done")
    assert run.wait(timeout=90).reason == "completed"
    return run


@pytest.fixture(scope="module")
def at_work(box: lorad.Lorad) -> lorad.Run:
    """A run that does not end by itself."""
    run = box.run(SPEC, name="at-work", trainer={"steps": 100000}, eval={"every": 0})
    run.wait(until="step>=1", timeout=90)
    return run


def test_a_run_is_what_its_spec_says(done: lorad.Run) -> None:
    assert (done.state, done.spec["trainer"]["steps"], done.spec["data"]["train"]) == ("ended", 4, "sort")
    assert done.progress == lorad.Progress("ended", 4, 4, 1.0, None)


def test_tables_hold_what_a_run_measured(done: lorad.Run) -> None:
    assert done.steps.column("step") == [1, 2, 3, 4] and done.steps.columns[4] == "reward"
    assert done.evals.column("step") == [0, 2, 4] and None not in done.evals.column("eval")
    assert len(done.samples(step=2)) == 8 and {sample.step for sample in done.samples()} == {4}
    assert done.versions[0].step == 0 and done.checkpoints.column("step") == [2, 4]


def test_events_and_logs_end_with_the_run(done: lorad.Run) -> None:
    kinds = [event.kind for event in done.events()]
    assert kinds.count("step") == 4 and kinds[-1] == "state" and "idle" not in kinds
    assert list(done.events(after=-1)) == []
    assert "completed: 4 of 4 steps" in done.logs() and "".join(done.follow_logs()) == done.logs()


def test_a_condition_that_was_met_counts(done: lorad.Run) -> None:
    assert done.wait(until="step>=4", timeout=1).step == 4
    assert done.wait(until="eval>=0").state == "ended"
    assert done.wait(until=lambda run: run.step == 4).step == 4


@pytest.mark.parametrize(
    ("until", "said"),
    [("eval>2", "eval>2 was never true: eval was"), ("evla>0", "evla was not measured; it has ")],
)
def test_a_condition_that_was_not_met(done: lorad.Run, until: str, said: str) -> None:
    with pytest.raises(lorad.NotReached, match=said) as raised:
        done.wait(until=until)
    assert raised.value.exit_code == 1 and "resume" in raised.value.hint


def test_a_run_shows_a_bar_and_curve(done: lorad.Run) -> None:
    shown = done._repr_mimebundle_()
    page = ElementTree.fromstring(shown["text/html"].replace("&#x27;", "'"))
    assert [one.tag.rpartition("}")[2] for one in page.iter()].count("polyline") == 2  # reward, and held-out
    assert shown["text/plain"].startswith("done ended (completed) 4/4 ━━━")


def test_a_list_of_runs_is_filtered(box: lorad.Lorad, done: lorad.Run) -> None:
    assert "done" in box.runs().column("name")
    assert [run.name for run in box.runs("d*", state="completed", base="builtin:*", limit=1)] == ["done"]
    assert box.runs(state=["failed", "queued"]) == [] == box.runs(owner="nobody at all")
    names = box.runs().column("name")
    assert box.runs(owner="me", base="builtin:tiny", sort="-name").column("name") == sorted(
        names, reverse=True
    )
    with pytest.raises(lorad.SpecError, match="no run is ever 'broken'"):
        box.runs(state="broken")


def test_a_broken_spec_is_refused(box: lorad.Lorad) -> None:
    with pytest.raises(lorad.SpecError, match="rnak: unknown key") as raised:
        box.run({**SPEC, "lora": {"rnak": 8}}, name="broken")
    assert raised.value.exit_code == 2 and raised.value.__notes__ == ["Did you mean lora.rank?"]
    with pytest.raises(lorad.NotFound):
        box.get("broken")


@pytest.mark.system
def test_a_version_is_served_and_exported(box: lorad.Lorad, done: lorad.Run, tmp_path: Path) -> None:
    version = done.versions[-1]
    assert len(box.generate(version, "S:21=", n=2, temperature=1.0).completions) == 2
    assert box.swap("bot", version).version == version.version and box.aliases[0].alias == "bot"
    assert (Path(box.export(version, tmp_path / "a").path) / "adapter_model.safetensors").exists()
    assert box.eval(version, "sort", problems=4).problems == 4 == done.results[0].problems
    assert box.remove_alias("bot").removed and box.pools[0].model == "builtin:tiny" and len(box.devices)


@pytest.mark.system
def test_a_fork_is_paused_resumed_and_stopped(done: lorad.Run) -> None:
    fork = done.fork(2, name="fork", trainer={"steps": 100000}, eval={"every": 0})
    assert fork.wait(until="step>=1", timeout=90).origin == "done@2"
    assert fork.pause().wait(timeout=90).state == "paused"
    fork.resume(rollout={"temperature": 0.7}).wait(until="step>=3", timeout=90)
    assert fork.spec["rollout"]["temperature"] == 0.7
    assert fork.stop().wait(timeout=90).reason == "stopped"
    assert fork.remove().removed
    with pytest.raises(lorad.NotFound):
        fork.wait()


@pytest.mark.system
def test_a_sweep_runs_each_point(box: lorad.Lorad, done: lorad.Run) -> None:
    sweep = box.sweep(SPEC, {"seed": range(2)}, name="grid", trainer={"steps": 1}, eval={"every": 0})
    assert {run.reason for run in sweep.wait(timeout=90).runs} == {"completed"}
    assert sorted(sweep.runs.column("seed")) == [0, 1]
    assert box.get_sweep("grid").runs[0].spec["trainer"]["steps"] == 1
    with pytest.raises(lorad.NotFound, match="no sweep gird"):
        box.get_sweep("gird")


def test_nobody_answers_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(lorad.DaemonUnreachable) as raised:
        lorad.connect(tmp_path, start=False)
    assert raised.value.exit_code == 5 and "lorad.connect(start=True)" in raised.value.hint
    assert not answers(tmp_path / "lorad.sock")


# -- async ---------------------------------------------------------------------------------------------------
async def test_async_twins_answer_the_same(made: World, done: lorad.Run) -> None:
    box = await lorad.connect_async(made.home.root)
    run = await box.get("done")
    assert (await run.steps) == done.steps and (await run.state) == "ended"
    assert [event.kind async for event in run.events()] == [event.kind for event in done.events()]
    assert [one.name for one in await box.runs("done")] == ["done"]
    assert (await box.runs("done")).column("step") == [4]
    with pytest.raises(lorad.NotReached):
        await run.wait(until="eval>2")


@pytest.mark.system
async def test_many_wait_at_once(made: World, done: lorad.Run) -> None:
    run = lorad.AsyncRun(done)
    found = await asyncio.gather(*(run.wait(until="step>=4") for _ in range(50)))
    assert {one.step for one in found} == {4}


# -- beside a run that works ---------------------------------------------------------------------------------
@pytest.mark.system
def test_a_wait_outlives_a_killed_daemon(box: lorad.Lorad, at_work: lorad.Run) -> None:
    step = at_work.details.step
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(at_work.wait, until=f"step>={step + 10}", timeout=90)
        os.kill(box.status.pid, signal.SIGKILL)
        assert waiting.result().step >= step + 10


def test_a_timeout_changes_nothing(at_work: lorad.Run) -> None:
    with pytest.raises(lorad.TimedOut, match=r"at-work is running at step .* of 100000 after 0.1 seconds"):
        at_work.wait(timeout=0.1)
    assert issubclass(lorad.TimedOut, TimeoutError) and at_work.state == "running"


async def test_a_cancelled_wait_leaves_no_thread(at_work: lorad.Run) -> None:
    before = threading.active_count()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(lorad.AsyncRun(at_work).wait(), 0.1)
    await until(lambda: threading.active_count() <= before, 30)  # it ends with the look that it is at


async def test_following_may_end_early(at_work: lorad.Run) -> None:
    async for event in lorad.AsyncRun(at_work).events():
        if event.kind == "step":
            break
    assert at_work.state == "running"


def test_a_killed_run_raises_why(at_work: lorad.Run) -> None:
    at_work.kill()
    with pytest.raises(lorad.RunFailed, match=r"at-work ended \(killed\) at step ") as raised:
        at_work.wait(timeout=90)
    assert (raised.value.run, raised.value.reason) == ("at-work", "killed")


# -- Jupyter -------------------------------------------------------------------------------------------------
START = """
import lorad
run = lorad.connect().run({
    "data": {"train": "sort", "prompts_per_step": 2}, "algorithm": {"group_size": 4},
    "trainer": {"steps": 8}, "rollout": {"max_new_tokens": 4}, "eval": {"every": 0}}, name="shown")
"""


@pytest.fixture(scope="module")
def kernel(made: World) -> Iterator[Any]:
    """A client of a kernel that works in the world's home."""
    manager = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    km, client = manager.start_new_kernel(
        kernel_name="python3", env=os.environ | {"LORAD_HOME": str(made.home.root)}
    )
    yield client
    client.stop_channels()
    km.shutdown_kernel(now=True)


def cell(client: Any, code: str) -> list[tuple[str, Any]]:
    """Run a cell; return what was shown, in order, by kind."""
    shown: list[tuple[str, Any]] = []
    reply = client.execute_interactive(
        code, timeout=90, output_hook=lambda message: shown.append((message["msg_type"], message["content"]))
    )
    assert reply["content"]["status"] == "ok", shown
    return shown


@pytest.mark.system
def test_watching_updates_one_display_in_place(kernel: Any) -> None:
    shown = cell(kernel, START + "run.watch(period=0.1)")
    kinds = [kind for kind, _ in shown]
    assert kinds.count("display_data") == 1 and kinds.count("update_display_data") > 1
    assert len({content["transient"]["display_id"] for kind, content in shown if "display" in kind}) == 1
    last = [content for kind, content in shown if kind == "update_display_data"][-1]["data"]["text/html"]
    assert "ended: completed" in last and "8 of 8 steps" in last and "<polyline" in last


def test_a_run_and_its_table_are_shown(kernel: Any, done: lorad.Run) -> None:
    code = "import lorad; done = lorad.connect().get('done')\n"
    (_, run), *_ = [one for one in cell(kernel, f"{code}done") if one[0] == "execute_result"]
    assert 'role="progressbar"' in run["data"]["text/html"] and "4/4" in run["data"]["text/plain"]
    (_, table), *_ = [one for one in cell(kernel, f"{code}done.steps") if one[0] == "execute_result"]
    assert table["data"]["text/html"].count("<tr>") == 5


def test_cells_await_the_async_twins(kernel: Any, done: lorad.Run) -> None:
    code = "import lorad; box = await lorad.connect_async(); run = await box.get('done')\n"
    code += "print((await run.wait()).step)"
    assert ("stream", {"name": "stdout", "text": "4\n"}) in cell(kernel, code)
