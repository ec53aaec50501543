"""The process of loggers: the daemon starts and adopts it, and it ends when all is written."""

import os
import signal
from pathlib import Path

import pytest

from lorad.box.paths import Home
from lorad.daemon.process.processes import attempts_under, read_status
from tests.kit.daemon_world import finished, reconciling, submit, until, until_state

pytest.importorskip("tensorboard")


def pid_of_loggers(home: Path) -> int:
    lives = list(attempts_under(home / "loggers"))
    return int(((read_status(lives[-1]) if lives else None) or {}).get("pid") or 0)


def steps_in(directory: Path) -> set[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    found.Reload()
    return {event.step for event in found.Scalars("lorad/version")} if found.Tags()["scalars"] else set()


def is_there(pid: int) -> bool:
    return pid > 0 and Path(f"/proc/{pid}").exists()


async def test_run_is_written_beside_it(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a", loggers=["tensorboard"])
        await until_state(ctx, "a", "ended")
        await until(lambda: ctx.services.followed == {} and not is_there(pid_of_loggers(home)))
    assert steps_in(home / "tensorboard" / "a") == {1, 2, 3, 4, 5, 6}
    modes = [path.stat().st_mode & 0o777 for path in Home(home).run("a").loggers.glob("*.json")]
    assert modes == [0o600]


async def test_run_without_loggers_starts_nothing(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "ended")
    assert not (home / "loggers").exists()


async def test_failing_logger_is_trouble_until_mended(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with reconciling(home) as ctx:
        submit(ctx, "a", loggers=[{"tensorboard": {"dir": str(tmp_path / "file")}}])
        assert (await until_state(ctx, "a", "ended")).reason == "completed"
        said = f"tensorboard of run a: {tmp_path / 'file'}"
        await until(lambda: any(line.startswith(said) for line in ctx.loop.troubles.lines()))
        (tmp_path / "file").unlink()
        await until(lambda: not ctx.loop.troubles.lines() and ctx.services.followed == {})
    assert steps_in(tmp_path / "file" / "a") == {1, 2, 3, 4, 5, 6}


async def test_killed_process_is_started_again(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with reconciling(home) as ctx:
        finished(ctx, "a", loggers=[{"tensorboard": {"dir": str(tmp_path / "file")}}])
        ctx.loop.poke()
        await until(lambda: is_there(pid_of_loggers(home)))
        pid = pid_of_loggers(home)
    async with reconciling(home) as ctx:
        await until(lambda: ctx.services.tables)
        assert pid_of_loggers(home) == pid
        os.kill(pid, signal.SIGKILL)
        (tmp_path / "file").unlink()
        await until(lambda: ctx.services.followed == {})
    assert steps_in(tmp_path / "file" / "a") == {1, 2, 3, 4, 5, 6}
