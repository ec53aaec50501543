"""Every second of a pool is somebody's, each once; what was reported survives the pool."""

import zlib
from pathlib import Path

import msgspec
import pytest

from lorad.models.turns import NOBODY, WORK, Caller, Party, Payer
from lorad.pool.energy import Reading, meter_of
from lorad.pool.ledger import Ledger
from lorad.pool.usage_file import UsageFile
from lorad.protocol.status import Use, Uses, encode_uses

A, B = Payer("a", 1), Payer("b", 1)
HEAD = Uses("life", "tiny-1", "cpu", 1, 0.0, 0.0, [])


class Clock:
    """Both clocks of a ledger."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ledger_of(clock: Clock, *, devices: int = 1, by_calls: bool = False) -> Ledger:
    return Ledger(clock=clock, unix=clock, devices=devices, by_calls=by_calls)


def held(uses: list[Use]) -> dict[str, tuple[float, float]]:
    """Held and busy seconds by run."""
    found: dict[str, tuple[float, float]] = {}
    for use in uses:
        before = found.get(use.run, (0.0, 0.0))
        found[use.run] = before[0] + use.held, before[1] + use.busy
    return found


def work(ledger: Ledger, clock: Clock, seconds: float, *payers: Payer) -> None:
    """One quantum."""
    weights = dict.fromkeys(payers, 1.0)
    ledger.starts(clock.now, weights)
    clock.now += seconds
    ledger.ends(clock.now, weights)


def test_seconds_add_up_to_the_life(clock: Clock) -> None:
    ledger = ledger_of(clock)
    clock.now = 4.0  # it starts
    ledger.holds(A, 100)
    work(ledger, clock, 3.0, A)
    ledger.holds(B, 200)
    clock.now += 2.0  # nobody works
    work(ledger, clock, 1.0, A, B)
    ledger.leaves("a")
    clock.now += 5.0
    assert held(ledger.settle()) == {"": (4.0, 0.0), "a": (4.5, 3.5), "b": (6.5, 0.5)}
    assert sum(use.held for use in ledger.entries()) == clock.now


def test_work_under_way_is_billed_once(clock: Clock) -> None:
    ledger = ledger_of(clock)
    ledger.starts(1.0, {A: 1.0})
    clock.now = 5.0
    assert held(ledger.settle()) == {"": (1.0, 0.0)}
    ledger.ends(6.0, {A: 1.0})
    assert held(ledger.settle()) == {"a": (5.0, 5.0)}


def test_overlapping_calls_share_every_device(clock: Clock) -> None:
    ledger = ledger_of(clock, devices=2, by_calls=True)
    before = WORK.set(Caller(Party("a"), A))
    with ledger.working():
        clock.now = 2.0
        WORK.set(Caller(Party("b"), B))
        with ledger.working():
            clock.now = 4.0
    WORK.reset(before)
    assert held(ledger.settle()) == {"a": (6.0, 6.0), "b": (2.0, 2.0)}


def test_entries_end_with_checkpoint_hour_and_attempt(clock: Clock) -> None:
    ledger = ledger_of(clock)
    ledger.opens("a", 0)
    work(ledger, clock, 1.0, A)
    ledger.saved("a", 5)
    work(ledger, clock, 1.0, A)
    clock.now += 3600.0
    work(ledger, clock, 1.0, A)
    ledger.opens("a", 5)
    work(ledger, clock, 1.0, Payer("a", 2))
    mine = [(use.attempt, use.step, use.hour) for use in ledger.entries() if use.run]
    assert mine == [(1, 0, 0), (1, 5, 0), (1, 5, 3600), (2, 5, 3600)]


def test_energy_goes_to_who_held(clock: Clock) -> None:
    ledger = ledger_of(clock)
    work(ledger, clock, 3.0, A)
    work(ledger, clock, 1.0, B)
    assert {use.run: use.joules for use in ledger.settle(joules=8.0)} == {"a": 6.0, "b": 2.0}
    work(ledger, clock, 1.0, B)
    assert {use.run: use.joules for use in ledger.settle()} == {"b": 2.0}


def test_file_has_each_change_whole(clock: Clock, tmp_path: Path) -> None:
    ledger, path = ledger_of(clock), tmp_path / "usage.jsonl"
    file = UsageFile(path, HEAD, ledger, None)
    for _ in range(3):
        work(ledger, clock, 1.0, A)
        file.write()
    file.write(last=True)
    lines = [text.partition(b" ") for text in path.read_bytes().splitlines()]
    assert all(int(crc, 16) == zlib.crc32(text) for crc, _, text in lines)
    found = [msgspec.json.decode(text, type=Uses).uses for _, _, text in lines]
    assert [use.held for uses in found for use in uses if use.run] == [1.0, 2.0, 3.0]


def test_file_is_written_anew(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.pool.usage_file._ROOM", 2000)
    ledger, path = ledger_of(clock), tmp_path / "usage.jsonl"
    file = UsageFile(path, HEAD, ledger, None)
    for payer in (A, B) * 20:
        work(ledger, clock, 1.0, payer)
        file.write(all=True)
    file.write(last=True)
    uses: dict[int, Use] = {}
    for text in path.read_bytes().splitlines():
        uses |= {use.entry: use for use in msgspec.json.decode(text.partition(b" ")[2], type=Uses).uses}
    assert held([*uses.values()])["a"] == (20.0, 20.0)
    assert path.stat().st_size < 40 * len(encode_uses(HEAD))


def test_disk_that_takes_nothing_loses_nothing(clock: Clock, tmp_path: Path) -> None:
    ledger, path = ledger_of(clock), tmp_path / "gone" / "usage.jsonl"
    file = UsageFile(path, HEAD, ledger, None)
    work(ledger, clock, 1.0, A)
    file.write()
    path.parent.mkdir()
    work(ledger, clock, 1.0, B)
    file.write(last=True)
    (only,) = path.read_bytes().splitlines()
    assert {use.run for use in msgspec.json.decode(only.partition(b" ")[2], type=Uses).uses} == {"", "a", "b"}


def test_energy_of_packages_turns_over(tmp_path: Path) -> None:
    zone, part = tmp_path / "intel-rapl:0", tmp_path / "intel-rapl:0:0"
    for place in (zone, part):
        place.mkdir()
        (place / "max_energy_range_uj").write_text("9999999\n")
        (place / "energy_uj").write_text("9000000\n")
    read = meter_of([], tmp_path)
    assert read is not None
    (zone / "energy_uj").write_text("1000000\n")
    assert read() == Reading(2.0)
    assert meter_of([], tmp_path / "none") is None


def test_nobody_pays_without_a_call() -> None:
    assert Caller(Party("x")).payer == NOBODY
