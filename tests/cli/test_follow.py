"""What `lorad run` prints while a run works, and commands that wait until what they began is done."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from lorad.cli import follow, output
from lorad.cli.app import app
from lorad.cli.commands import episodes
from lorad.client.client import Client
from lorad.protocol.evals import Expected
from lorad.records.measured import Metrics, Step
from lorad.records.runs import Rates, RunDetails, Signals
from lorad.records.samples import Sample, TrialEvent
from lorad.selection import Selection
from lorad.tui.dashboard.run_rows import state_text
from tests.kit.daemon_world import ENDLESS, hold, release, serving, until


def a_run(**more: Any) -> RunDetails:
    return replace(RunDetails("a", "running", step=1, steps=3), **more)


def test_a_quiet_run_says_what_it_is_doing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("lorad.cli.follow.time.monotonic", lambda: now[0])
    view = follow._RunLines()

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


def test_a_completion_is_shown_each_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("lorad.cli.follow.time.monotonic", lambda: now[0])
    live = follow.LiveLine(lambda step: Sample(step, completion=f"{step}\nand more", answer="7", reward=1.0))

    def shown(seconds: float, step: int, **metrics: float) -> str:
        now[0] += seconds
        of_step: Metrics = {"tokens_per_second": 1.0, **metrics}
        live.update(a_run(step=step), [Step(step, metrics=of_step)], [])
        return capsys.readouterr().err

    assert shown(0, 1, loss=1.0) == ""  # nothing was sampled
    assert shown(0, 2, response_length=3.0) == "step 2, one sample: 1.000 (answer 7)  2⏎and more\n"
    assert shown(1, 3, response_length=3.0) == ""
    assert shown(1, 4, response_length=3.0).startswith("step 4")


def test_the_phase_stays_in_a_narrow_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lorad.cli.follow.time.monotonic", lambda: now[0])
    live = follow.LiveLine()
    metrics: Metrics = {"response_length": 3.0, "tokens_per_second": 10.0, "reward": 0.5}
    live.live.console.width = 80
    run = a_run(doing="sampling 41 of 64, 812 tok/s", rates=Rates(step_seconds=60.0))

    def drawn(seconds: float, *steps: Step) -> str:
        now[0] += seconds
        live.update(run, list(steps), [])
        return str(live.live.get_renderable())

    assert "sampling" not in drawn(0, Step(1, metrics=metrics))  # its figures say enough
    assert drawn(4) == "a running 1/3  sampling 41 of 64, 812 tok/s  reward 0.500  ETA 2m00s"


def test_equal_figures_are_said_once() -> None:
    ended = RunDetails("a", "ended", "completed", step=3, steps=3, eval_first=0.1882, eval_last=0.1879)
    assert follow.conclusion(ended).endswith("held-out eval 0.188")
    assert follow.conclusion(replace(ended, eval_last=0.25)).endswith("held-out eval 0.188 -> 0.250")


def test_a_run_ends_with_its_cause_first() -> None:
    failed = RunDetails("a", "ended", "failed", step=1, steps=1, detail="the reward failed: it is broken.")
    signals = Signals(failed_rewards=8.0, failed_rewards_total=8.0, idle_steps_total=1.0, truncated=0.75)
    assert follow.conclusion(replace(failed, signals=signals)) == (
        "a ended (failed) at step 1 of 1: the reward failed: it is broken; 8 rewards failed; 1 of 1 steps "
        "changed nothing"
    )


def test_a_run_ends_with_what_was_expected() -> None:
    expected = [
        Expected("eval", 3, 0.5, None, "a table", "met", 0.75),
        Expected("kl", 3, None, 0.1, "", "missed"),
    ]
    ended = RunDetails("a", "ended", "completed", step=3, steps=3, expected=expected)
    assert follow.conclusion(ended).endswith(
        "step 3 of 3; eval met 0.750 at 3, expected at least 0.5 (a table); kl missed, not measured at 3, "
        "expected at most 0.1"
    )


def test_a_lost_run_advises_once() -> None:
    lost = RunDetails("a", "ended", "lost", step=1, steps=3, detail="pool p was killed by SIGKILL")
    advised = replace(lost, detail="pool p is gone; `lorad resume a` continues from a checkpoint.")
    assert follow.conclusion(lost).endswith("was killed by SIGKILL; `lorad resume a` continues")
    assert follow.conclusion(advised).endswith(
        "pool p is gone; `lorad resume a` continues from a checkpoint."
    )


async def typed(*arguments: str) -> int:
    """Run a command in a thread; its exit code."""

    def code() -> int:
        return app([*arguments], standalone_mode=False) or 0

    return await asyncio.to_thread(code)


@pytest.mark.parametrize("command", [("pause", "a", "--wait"), ("pause", "a", "--wait", "--json")])
async def test_pause_waits_until_the_run_is_paused(
    command: tuple[str, ...], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold(home)
    async with serving(home) as api:
        await api.run("a", ENDLESS)
        await api.until("a", "running")
        pausing = asyncio.create_task(typed(*command))
        await api.until("a", "stopping")
        assert not pausing.done()
        release(home)
        assert await pausing == 0
        out, err = capsys.readouterr()
        if "--json" in command:
            assert json.loads(out)["state"] == "paused"
        else:
            assert "a is pausing: it finishes its step" in err and err.endswith("a is paused.\n")


async def test_a_run_that_pauses_is_said_to(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hold(home)
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "running")
        await api("pause", "a")
        run = await api("show", "a")
        assert (run.state, run.wanted, state_text(run).plain) == ("stopping", "pause", "◑ pausing")
        for command in (
            ("list", "-c", "state"),
            ("list", "-c", "state", "--state", "pausing"),
            ("show", "a"),
        ):
            await typed(*command)
            assert "pausing" in capsys.readouterr().out
        await api("stop", "a")
        await typed("list", "-c", "state", "--state", "stopping")
        assert capsys.readouterr().out.splitlines()[1:] == ["stopping"]
        assert await api("select", Selection(state=["pausing"])) == []
        release(home)


async def test_resume_waits_for_a_run_that_pauses(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hold(home)
    async with serving(home) as api:
        await api.run("a", ENDLESS)
        await api.until("a", "running")
        await api("pause", "a")
        await api.until("a", "stopping")
        said, resuming = "", asyncio.create_task(typed("resume", "a", "--detach", "--wait"))
        while "a is still pausing: it is resumed after that." not in said:
            assert not resuming.done()
            await asyncio.sleep(0.02)
            said += capsys.readouterr().err
        release(home)
        await resuming
        run = await api("show", "a")
        assert run.attempt == 2 and run.state != "queued"


async def test_interrupted_pause_leaves_the_run_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hold(home)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    async with serving(home) as api:
        await api.run("a", ENDLESS)
        await api.until("a", "running")
        monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=interrupted, monotonic=time.monotonic))
        assert await typed("pause", "a", "--wait") == 130
        assert "Detached; a stops all the same" in capsys.readouterr().err
        release(home)
        await api.until("a", "paused")


def test_what_is_waited_for_is_seen_on_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Client()
    for quiet, is_terminal in ((False, False), (True, True), (False, True)):
        monkeypatch.setattr("sys.stderr.isatty", lambda is_terminal=is_terminal: is_terminal)
        output.telling(client, quiet=quiet)
        assert (client._http.on_doing is output.doing) == (is_terminal and not quiet)
        assert client._http.on_doing is not None
    monkeypatch.setenv("COLUMNS", "40")
    output.doing("loading weights 120 of 272\x1b[5m\n" + "x" * 99)
    assert capsys.readouterr().err == f"\r\x1b[2Kloading weights 120 of 272\\x1b[5m {'x' * 4}…"
    output.doing("")
    assert capsys.readouterr().err == "\r\x1b[2K"


async def test_several_that_pause_are_counted(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(output, "doing", told.append)
    hold(home)
    async with serving(home) as api:
        for name in "bc":
            await api.run(name, "trainer.steps=10000")
            await api.until(name, "running")
        pausing = asyncio.create_task(typed("pause", "b", "c", "--yes", "--wait"))
        await until(lambda: told)
        assert told[0].startswith("0 of 2 done; ") and "b: " in told[0] and "c: " in told[0]
        release(home)
        assert await pausing == 0
        assert {"b is paused.", "c is paused."} <= {*capsys.readouterr().err.splitlines()} and told[-1] == ""


@pytest.mark.parametrize("verb", ["run", "resume", "fork", "sweep", "check", "try", "serve", "swap"])
def test_every_wait_can_be_silent(verb: str) -> None:
    assert app([verb, "-q", "--help"], standalone_mode=False) in (0, None)


def test_a_silent_trial_says_no_phases(capsys: pytest.CaptureFixture[str]) -> None:
    events = [TrialEvent("phase", "loading weights"), TrialEvent("end", seconds=2.0)]
    assert episodes._follow(iter(events), quiet=True) == ([], 2.0)
    assert capsys.readouterr().err == ""
    episodes._follow(iter(events), quiet=False)
    assert capsys.readouterr().err == "loading weights\n"


async def test_a_stopped_pool_is_gone_where_waited_for(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "ended")
        (pool,) = await api("pools")
        assert await typed("pools", "stop", pool.pool, "--wait") == 0
        assert "has ended, and its devices are free." in capsys.readouterr().err
        assert await api("pools") == []
