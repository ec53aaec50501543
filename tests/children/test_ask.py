"""A process under a guard that is asked within a block: `lorad/children/ask.py`."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from lorad.children import guard
from lorad.children.ask import lines_of, under_guard
from lorad.children.identity import start_time
from lorad.errors import PoolLost

# says when it listens, and ends SECONDS after SIGTERM
SLOW = """
import signal, sys, time
def end(*_):
    time.sleep(float(sys.argv[1]))
    open(sys.argv[2], "w").write("by itself")
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("grace", "ends_itself"), [(0.0, False), (0.3, False), (30.0, True)])
async def test_grace_is_what_a_child_has(grace: float, ends_itself: bool, tmp_path: Path) -> None:
    argv = [sys.executable, "-I", "-S", "-c", SLOW, "0.1" if ends_itself else "60", str(tmp_path / "end")]
    began = time.monotonic()
    async with under_guard(argv, os.environ, grace=grace) as process:
        assert process.stdout is not None
        await process.stdout.readline()
    assert (tmp_path / "end").exists() == ends_itself
    assert process.returncode == (0 if ends_itself else 128 + signal.SIGKILL)
    assert time.monotonic() - began < 20


async def test_a_guard_that_is_stopped_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "END_SECONDS", 0.2)
    async with under_guard(["sh", "-c", "echo $$; exec sleep 600"], os.environ) as process:
        assert process.stdout is not None
        pid = int(await process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
    assert process.returncode == -signal.SIGKILL
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10):
            while start_time(pid) is not None:  # noqa: ASYNC110 (it is polled)
                await asyncio.sleep(0.01)
    assert start_time(pid) is None


async def test_grace_is_kept_though_cancelled_twice(tmp_path: Path) -> None:
    argv = [sys.executable, "-I", "-S", "-c", SLOW, "0.2", str(tmp_path / "end")]
    is_ready = asyncio.Event()

    async def ask() -> None:
        async with under_guard(argv, os.environ, grace=30.0) as process:
            assert process.stdout is not None
            await process.stdout.readline()
            is_ready.set()
            await asyncio.sleep(600)

    asking = asyncio.create_task(ask())
    await is_ready.wait()
    for _ in range(2):
        asking.cancel()
        await asyncio.sleep(0.02)
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (tmp_path / "end").read_text() == "by itself"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("cat; echo what went wrong >&2", "the child fell over: what went wrong"),
        ("cat; yes | tr -d '\\n'", "the child printed a line without end"),
    ],
    ids=["ended", "endless"],
)
async def test_a_child_without_an_answer_is_lost(program: str, says: str) -> None:
    lines = []
    with pytest.raises(PoolLost, match=says):
        async with (
            under_guard(["sh", "-c", program], os.environ) as process,
            contextlib.aclosing(lines_of(process, "the child", b"asked\n")) as answers,
        ):
            async for line in answers:
                lines.append(line)
    assert lines == [b"asked\n"]
