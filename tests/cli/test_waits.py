"""Commands that wait until what they began is done: pause, and resume of a run that is still pausing."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lorad.cli import follow
from lorad.cli.app import app
from tests.kit.daemon_world import hold, release, serving


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
        await api.run("a")
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


async def test_resume_waits_for_a_run_that_pauses(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hold(home)
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "running")
        await api("pause", "a")
        await api.until("a", "stopping")
        said, resuming = "", asyncio.create_task(typed("resume", "a", "--detach", "--wait"))
        while "a is still stopping: it is resumed after that." not in said:
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
        await api.run("a")
        await api.until("a", "running")
        monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=interrupted, monotonic=time.monotonic))
        assert await typed("pause", "a", "--wait") == 130
        assert "Detached; a stops all the same" in capsys.readouterr().err
        release(home)
        await api.until("a", "paused")
