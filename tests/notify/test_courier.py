"""The courier: tries again for a bounded time, and sends nothing twice that it knows to be delivered."""

import asyncio
import time
from pathlib import Path

import psutil
import pytest

from lorad.notify import courier
from lorad.notify.courier import GIVE_UP_SECONDS, Courier
from lorad.notify.outbox import message_of
from lorad.notify.table import Delivery, State
from lorad.spec.notify import Notify
from tests.kit.daemon_world import until


def to(path: Path, key: str = "0.a", *, at: float | None = None) -> Delivery:
    """A command that appends a line to a file, which works as soon as its directory exists."""
    message = message_of("end", time.time() if at is None else at, {"run": "a"})
    return Delivery(key, Notify(command=["sh", "-c", f"echo {key} >> {path}"]), message)


async def reached(made: Courier, *, done: int = 0, given_up: int = 0, faults: int = 0) -> State:
    async with asyncio.timeout(60):
        while [len(made.state.done), len(made.state.given_up), len(made.state.faults)] != [
            done,
            given_up,
            faults,
        ]:
            await made.changed(0.5)
    return made.state


async def test_failed_delivery_is_tried_again_until_it_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier, "_FIRST_PAUSE", 0.05)
    made, path = Courier(State()), tmp_path / "there" / "got"
    made.deliver_only([to(path), to(tmp_path / "got", "1.a")])
    state = await reached(made, done=1, faults=1)  # one that fails holds up no other
    assert "code" in state.faults[0].says and state.done == ["1.a"]
    path.parent.mkdir()
    await reached(made, done=2)
    assert path.read_text() == "0.a\n"


async def test_next_life_sends_nothing_that_was_delivered(tmp_path: Path) -> None:
    first = Courier(State())
    first.deliver_only([to(tmp_path / "got")])
    state = await reached(first, done=1)
    second = Courier(state)
    second.deliver_only([to(tmp_path / "got"), to(tmp_path / "got", "1.a")])
    await reached(second, done=2)
    assert (tmp_path / "got").read_text() == "0.a\n1.a\n"


async def test_it_is_given_up_after_a_bounded_time(tmp_path: Path) -> None:
    made = Courier(State())
    made.deliver_only([to(tmp_path / "no" / "got", at=time.time() - GIVE_UP_SECONDS)])
    state = await reached(made, given_up=1)
    assert state.given_up[0].key == "0.a"
    made.deliver_only([])
    assert made.state == State()


async def test_stop_kills_the_command_under_way(tmp_path: Path) -> None:
    made = Courier(State())
    one = Notify(command=["sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 600"])
    made.deliver_only([Delivery("0.a", one, message_of("end", time.time(), {"run": "a"}))])
    pid = await until(lambda: (path := tmp_path / "pid").exists() and path.read_text().strip())
    await made.stop()
    assert await until(lambda: not psutil.pid_exists(int(pid)))
