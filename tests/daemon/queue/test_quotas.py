"""Who has used all of their device-hours waits until enough of them are past, and is told when that is."""

import time
from pathlib import Path

import pytest

from lorad.box.config import DeviceHours, Limit, Queue, load
from lorad.cli.bill import print_bill
from lorad.daemon.bill.answer import bill_of
from lorad.daemon.context import Context
from lorad.daemon.process.users import Caller
from lorad.daemon.queue.limits import enough_again, over_hours
from lorad.daemon.queue.place import place_runs
from lorad.errors import SpecError
from lorad.store.bill import HOUR
from tests.daemon.queue.test_limits import owned, told, working
from tests.daemon.queue.test_shares import ANN, BOB, used
from tests.kit.daemon_world import open_context

DAY = DeviceHours(most=5.0, per="1d")
NOW = 1_000_000 * HOUR + 1800.0


def with_quota(home: Path, quota: DeviceHours = DAY) -> Context:
    return open_context(home, queue=Queue(limits=Limit(device_hours=quota)))


def test_who_used_all_waits_and_bob_does_not(home: Path) -> None:
    ctx = with_quota(home)
    owned(ctx, "ann", ANN, "a1")
    place_runs(ctx)
    used(ctx, "a1", 6.0)
    owned(ctx, "ann", ANN, "a2")
    owned(ctx, "bob", BOB, "b1", model="/models/tiny")
    place_runs(ctx)
    assert "a1" in working(ctx) and "a2" not in working(ctx)  # what works is not stopped
    assert told(ctx, "a2").startswith("ann used 6.0 of 5 device-hours in 1d; enough again at ")
    assert "run a1" in told(ctx, "b1")  # its own trouble: another user's pool, and not the run that waits


def test_run_starts_when_use_is_past(home: Path) -> None:
    ctx = with_quota(home)
    owned(ctx, "ann", ANN, "a1")
    used(ctx, "a1", 6.0, ago=23)
    place_runs(ctx)
    assert working(ctx) == []
    with ctx.store.write() as connection:
        connection.execute("UPDATE uses SET hour = hour - 3 * 3600")
    ctx.bill.taken += 1
    place_runs(ctx)
    assert working(ctx) == ["a1"]


def test_time_of_enough_is_when_hours_leave() -> None:
    first = int(NOW) // HOUR * HOUR
    hours = [(first - 20 * HOUR, 2.0 * HOUR), (first - 10 * HOUR, 3.0 * HOUR), (first, 1.0 * HOUR)]
    hours.insert(0, (first - 40 * HOUR, 9.0 * HOUR))  # which is past
    assert enough_again(hours, DAY, NOW) == first + 5 * HOUR
    assert enough_again(hours, DeviceHours(3.5, "1d"), NOW) == first + 15 * HOUR
    assert enough_again(hours, DeviceHours(9.0, "1d"), NOW) == NOW
    assert enough_again(hours, DeviceHours(0.0, "1d"), NOW) is None
    # 252 seconds are .07 hours, though .07 hours are more than 252 seconds to a computer
    assert enough_again([(first, 252.0)], DeviceHours(0.07, "1d"), NOW) == first + 25 * HOUR


def test_quota_ends_exactly_when_it_says(home: Path) -> None:
    ctx = with_quota(home)
    owned(ctx, "ann", ANN, "a1")
    used(ctx, "a1", 6.0, ago=3)
    again = enough_again([(int(time.time() - 3 * HOUR) // HOUR * HOUR, 6.0 * HOUR)], DAY, time.time())
    assert again is not None
    assert over_hours(ctx, "ann", ANN, again - 1) and not over_hours(ctx, "ann", ANN, again)


async def test_bill_shows_what_is_used_of_quotas(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ctx = with_quota(home)
    owned(ctx, "ann", ANN, "a1")
    owned(ctx, "bob", BOB, "b1")
    used(ctx, "a1", 6.0)
    used(ctx, "b1", 1.0)
    found = await bill_of(ctx, Caller(0, "root"), "user")
    assert [(one.user, one.used, one.again is None) for one in found.quotas] == [
        ("ann", 6.0, False),
        ("bob", 1.0, True),
    ]
    print_bill(found)
    assert "ann\t6.0 h\t5 h\t1d\t" in capsys.readouterr().out
    found = await bill_of(ctx, Caller(0, "root"), "user", user="bob")
    assert [one.user for one in found.quotas] == ["bob"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{limits: {device_hours: {most: 3, per: 7x}}}", "queue.limits.device_hours"),
        ("{limits: {device_hours: {per: 7d}}}", "queue.limits.device_hours"),
        ("{limits: {device_hours: {most: -1}}}", "queue.limits.device_hours.most"),
        ("{limits: {device_hours: {most: .inf}}}", "queue.limits.device_hours.most"),
        ("{users: {ann: {device_hours: 100}}}", "device_hours"),
        ("{half_life: -1}", "queue.half_life"),
        ("{half_life: .inf}", "queue.half_life"),
    ],
)
def test_malformed_quota_is_refused_by_key(text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"queue: {text}")
    with pytest.raises(SpecError) as refused:
        load(tmp_path / "config.yaml")
    assert key in refused.value.message
