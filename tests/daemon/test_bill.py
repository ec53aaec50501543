"""What pools write about their use is taken in, counts once, and is passed over where it is not sound."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lorad.daemon.bill.take_in import keep_bill
from lorad.daemon.context import Context
from lorad.daemon.pool import Pool
from lorad.daemon.process.processes import ProcessState
from lorad.pool.usage_file import line
from lorad.protocol.pool_setup import PoolSetup
from lorad.protocol.status import Use, Uses
from lorad.store.bill import bill
from tests.kit.daemon_world import open_context

HEAD = Uses("life", "tiny-1", "cpu", 1, 100.0, 100.0, [])


@pytest.fixture
def ctx(home: Path) -> Iterator[Context]:
    """A daemon that knows one pool, whose first life has a file of uses."""
    ctx = open_context(home)
    root = ctx.home.pool("tiny-1")
    (root / "attempts/0001").mkdir(parents=True)
    setup = PoolSetup(
        pool="tiny-1",
        model="m",
        model_path="/m",
        device="cpu",
        threads=1,
        owner=os.getuid(),
    )
    ctx.pools["tiny-1"] = Pool(setup, root, ProcessState("alive", 1))
    yield ctx
    ctx.store.close()
    ctx.journal.close()


def path_of(ctx: Context) -> Path:
    return ctx.pools["tiny-1"].root / "attempts/0001/usage.jsonl"


def of(*uses: Use) -> bytes:
    return line(msgspec.structs.replace(HEAD, uses=list(uses)))


def held(ctx: Context) -> float:
    ctx.bill.read_at = float("-inf")
    keep_bill(ctx)
    return sum(row.held for row in bill(ctx.store))


def test_file_is_taken_in_as_it_grows(ctx: Context) -> None:
    whole = of(Use(1, 0, held=2.0)) + of(Use(1, 0, held=3.0), Use(2, 0, "a", 1, held=4.0))
    found = []
    for size in range(0, len(whole) + 1, 25):
        path_of(ctx).write_bytes(whole[:size])
        found.append(held(ctx))
    path_of(ctx).write_bytes(whole)
    assert held(ctx) == 7.0 and sorted(found) == found and set(found) == {0.0, 2.0}


def test_file_that_was_written_anew_counts_once(ctx: Context) -> None:
    path_of(ctx).write_bytes(of(Use(1, 0, held=2.0)) * 5)
    assert held(ctx) == 2.0
    path_of(ctx).unlink()
    path_of(ctx).write_bytes(of(Use(1, 0, held=6.0)))
    assert held(ctx) == 6.0


@pytest.mark.parametrize(
    "wrong",
    [
        b"00000000 {}\n",
        b"not a line\n\n",
        b"\xff" * 40 + b"\n",
        line(HEAD).replace(b"tiny-1", b"tiny-2"),
        line(msgspec.structs.replace(HEAD, uses=[Use(1, 10**12, held=1.0)])),
        line(msgspec.structs.replace(HEAD, uses=[Use(-1, 0, held=-5.0)])),
    ],
)
def test_lines_that_are_not_sound_are_passed_over(ctx: Context, wrong: bytes) -> None:
    path_of(ctx).write_bytes(wrong + of(Use(1, 0, held=2.0)) + wrong)
    assert held(ctx) == 2.0 and not ctx.loop.troubles.lines()


def test_pipe_in_place_of_the_file_is_refused(ctx: Context) -> None:
    os.mkfifo(path_of(ctx))
    assert held(ctx) == 0.0 and ctx.loop.troubles.lines()


@pytest.mark.parametrize(
    "end",
    [{"ended_at": 110.0}, {"started_at": 100.0, "lived": 10.0, "ended_at": 1e10}],
    ids=["", "clock set"],
)
def test_end_of_a_pool_closes_its_bill(ctx: Context, end: dict[str, float]) -> None:
    path_of(ctx).write_bytes(of(Use(1, 0, "a", 1, held=2.0)))
    never = dict.fromkeys(("shim_pid", "shim_start_time", "pid", "start_time", "signal"))
    ended = {**never, "boot_id": "", "exit_code": 0, **end}
    (path_of(ctx).parent / "status.json").write_bytes(msgspec.json.encode(ended))
    ctx.pools["tiny-1"].process = ProcessState("exited", exit_code=0)
    assert held(ctx) == 10.0
    path_of(ctx).unlink()
    ctx.bill.closed.clear()
    assert held(ctx) == 10.0
