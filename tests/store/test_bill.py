"""The bill: read twice counts once, thrown away is shown apart, and nothing vanishes with a run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.protocol.journal import JournalWriter, StepFact
from lorad.protocol.status import Use, Uses
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.bill import BillRow, Person, bill, close, decayed, hours_of_users, is_closed, take_in
from lorad.store.db import Store
from lorad.store.ingest import ingest
from tests.kit.journals import begin, new_run

POOL, HOUR = Person("root", 0), 3600


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "lorad.db")
    new_run(store)
    yield store
    store.close()


def report(*uses: Use, life: str = "l1") -> Uses:
    return Uses(life, "tiny-1", "cpu", 1, 0.0, 0.0, list(uses))


def of(store: Store, key: str = "sorter", **times: float) -> BillRow:
    found = bill(store, since=times.get("since"), until=times.get("until"))
    rows = [row for row in found if row.key == key and row.device]
    return rows[0] if rows else BillRow(key=key)


def step(writer: JournalWriter, number: int, tokens: int) -> None:
    measured = {"seconds_sampling": 1.0, "tokens": float(tokens), "trained_tokens": tokens - 1.0}
    writer.append("step", number, StepFact(number - 1, [], 0, f"samples/{number}", "ab", measured))


def journal(store: Store, path: Path) -> None:
    """Two attempts: the second one began at step 1, so that step 2 was done twice."""
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
        step(writer, 1, 10)
        step(writer, 2, 20)
    with JournalWriter(path, "sorter", 2) as writer:
        begin(writer, 1)
        step(writer, 2, 30)
    ingest(store, "sorter", path)


def tokens(store: Store) -> tuple[int, int, int]:
    rows = [row for row in bill(store) if row.key == "sorter"]
    sampled, trained = sum(row.sampled for row in rows), sum(row.trained for row in rows)
    return sampled, trained, sum(row.wasted_tokens for row in rows)


def remove(store: Store) -> None:
    runs.move(store, "sorter", Move.END, reason=EndReason.STOPPED)
    runs.remove(store, "sorter")


def test_report_read_twice_counts_once(store: Store) -> None:
    first, later = Use(1, 0, "sorter", 1, held=2.0, busy=1.0, joules=3.0), Use(1, 0, "sorter", 1, held=5.0)
    for uses in (first, later, first, later):
        take_in(store, report(uses), POOL)
    found = of(store)
    assert (found.owner, found.held, found.busy, found.joules) == ("ada", 5.0, 1.0, 3.0)


def test_later_attempt_throws_away_what_follows_its_checkpoint(store: Store) -> None:
    uses = [Use(1, 0, "sorter", 1, 0, held=1.0), Use(2, 0, "sorter", 1, 4, held=2.0)]
    take_in(store, report(*uses), POOL)
    assert of(store).wasted == 0.0
    take_in(store, report(Use(1, 0, "sorter", 2, 4, held=8.0), life="l2"), POOL)
    assert (of(store).held, of(store).wasted) == (11.0, 2.0)
    take_in(store, report(Use(1, 0, "sorter", 3, 0, held=16.0), life="l3"), POOL)
    assert (of(store).held, of(store).wasted) == (27.0, 11.0)


def test_tokens_are_those_of_the_journal(store: Store, tmp_path: Path) -> None:
    journal(store, tmp_path / "journal.jsonl")
    assert tokens(store) == (60, 57, 20)


def test_cut_journal_takes_its_tokens_back(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal(store, path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    ingest(store, "sorter", path)
    assert tokens(store) == (30, 28, 20)


def test_removed_run_keeps_its_bill(store: Store, tmp_path: Path) -> None:
    take_in(store, report(Use(1, 0, "sorter", 1, 1, held=2.0), Use(2, 0, "sorter", 2, 1, held=4.0)), POOL)
    journal(store, tmp_path / "journal.jsonl")
    before = of(store), tokens(store)
    remove(store)
    new_run(store)
    take_in(store, report(Use(1, 0, "sorter", 3, 0, held=1.0), life="l2"), POOL)
    assert tokens(store) == before[1] == (60, 57, 20)
    assert (of(store).held, of(store).wasted) == (7.0, before[0].wasted) == (7.0, 2.0)


def test_unreported_end_of_a_pool_is_nobodys(store: Store) -> None:
    take_in(store, report(Use(1, 0, "sorter", 1, held=6.0), Use(2, 0, held=1.0)), POOL)
    close(store, "l1", 10.0)
    close(store, "l1", 10.0)
    assert is_closed(store, "l1") and (of(store, "").held, of(store).held) == (4.0, 6.0)


def test_user_of_a_shared_box_bills_nobody_else(store: Store) -> None:
    uid = runs.get(store, "sorter").owner_uid
    take_in(store, report(Use(1, 0, "sorter", 1, held=6.0)), Person("eve", uid + 1), strange=True)
    assert of(store).held == 0.0
    take_in(store, report(Use(1, 0, "sorter", 1, held=6.0), life="l2"), Person("ada", uid), strange=True)
    assert of(store).held == 6.0


def test_bill_of_some_hours_and_of_a_user(store: Store) -> None:
    take_in(store, report(Use(1, 0, "sorter", 1, held=1.0), Use(2, HOUR, "sorter", 1, held=2.0)), POOL)
    take_in(store, report(Use(3, HOUR, held=4.0)), POOL)
    assert of(store, since=HOUR + 5.0).held == 2.0 and of(store, until=HOUR).held == 1.0
    assert [row.key for row in bill(store, user="ada")] == ["sorter"] and bill(store, user="eve") == []
    keys = {by: {row.key: row.held for row in bill(store, by)} for by in ("user", "sweep", "alias", "pool")}
    assert keys["user"] == {"ada": 3.0, "": 4.0} and keys["sweep"] == {"-": 3.0, "": 4.0}
    assert keys["alias"] == {"-": 3.0, "": 4.0} and keys["pool"] == {"tiny-1": 7.0}


def test_use_of_long_ago_counts_less(store: Store) -> None:
    take_in(store, report(Use(1, 0, "sorter", 1, held=8.0), Use(2, 10 * HOUR, "sorter", 1, held=1.0)), POOL)
    uid = runs.get(store, "sorter").owner_uid
    assert hours_of_users(store, HOUR) == {uid: [(10 * HOUR, 1.0)]}
    hours = hours_of_users(store, 0.0)
    assert hours == {uid: [(0, 8.0), (10 * HOUR, 1.0)]}
    assert decayed(hours[uid], 5.0 * HOUR, 10.0 * HOUR) == pytest.approx(3.0)
    assert decayed(hours[uid], 0.25 * HOUR, 10.0 * HOUR) == 1.0
