"""What pools write about their use is taken in, counts once, and is passed over where it is not sound."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.daemon.bill import take_in
from lorad.daemon.bill.take_in import keep_bill
from lorad.daemon.context import Context
from lorad.daemon.pool import Pool
from lorad.daemon.process.processes import ProcessState
from lorad.protocol.pool_setup import PoolSetup
from lorad.protocol.status import Use, Uses, encode_uses
from lorad.store.bill import HOUR, bill, hours_of_users
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
    return encode_uses(msgspec.structs.replace(HEAD, uses=list(uses)))


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
        encode_uses(HEAD).replace(b"tiny-1", b"tiny-2"),
        encode_uses(msgspec.structs.replace(HEAD, uses=[Use(1, 10**12, held=1.0)])),
        encode_uses(msgspec.structs.replace(HEAD, uses=[Use(-1, 0, held=-5.0)])),
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


@pytest.fixture
def strange(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> Context:
    """The pool is another user's, and began a thousand seconds ago."""
    monkeypatch.setattr(take_in, "_is_strange", lambda ctx, pool: True)
    lives = dict.fromkeys(
        ("shim_pid", "shim_start_time", "pid", "start_time", "signal", "ended_at", "exit_code")
    )
    status = {**lives, "boot_id": "", "started_at": time.time() - 1000.0}
    (path_of(ctx).parent / "status.json").write_bytes(msgspec.json.encode(status))
    return ctx


def counted(ctx: Context) -> float:
    """What counts of the user's, in the queue."""
    held(ctx)
    hours = hours_of_users(ctx.store, 0.0, strange=True)
    return sum(seconds for of_user in hours.values() for _, seconds in of_user)


def test_users_who_hide_the_file_gain_nothing(strange: Context) -> None:
    assert 800 < counted(strange) < 1000
    now = int(time.time()) // HOUR * HOUR
    forged = msgspec.structs.replace(HEAD, since=1.0, uses=[Use(1, now, "a", 1, held=5.0)])
    path_of(strange).write_bytes(encode_uses(forged))
    assert 800 < counted(strange) < 1000
    honest = msgspec.structs.replace(forged, uses=[Use(1, now, "a", 1, held=960.0), Use(2, now, held=20.0)])
    with path_of(strange).open("ab") as file:
        file.write(encode_uses(honest))
    assert counted(strange) == pytest.approx(980.0)


@pytest.mark.parametrize(
    "wrong", [{"held": 1e9}, {"run": "", "served": 5}, {"served": 2**61}, {"hour": 3 * 10**9}, {"busy": 1e9}]
)
def test_uses_that_cannot_be_are_passed_over(strange: Context, wrong: dict[str, Any]) -> None:
    use = msgspec.structs.replace(Use(1, HOUR, "a", 1, held=2.0, served=7), **wrong)
    path_of(strange).write_bytes(of(use, Use(2, HOUR, "a", 1, held=3.0)))
    held(strange)
    assert sum(row.held for row in bill(strange.store, until=2 * HOUR)) == 3.0


def test_sums_of_what_was_forged_before_are_readable(ctx: Context) -> None:
    path_of(ctx).write_bytes(of(*(Use(n, 0, "a", 1, served=2**61) for n in range(1, 9))))
    held(ctx)
    assert bill(ctx.store)[0].served == 9 * 10**18
