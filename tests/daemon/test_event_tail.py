"""Followers of events get each event of theirs once, in order, however far behind they are."""

import random
from pathlib import Path

import pytest

from lorad.daemon import event_tail
from lorad.daemon.event_tail import Tail, line_of
from lorad.store import events
from lorad.store.db import Store
from tests.kit.journals import new_run


@pytest.mark.parametrize("seed", range(4))
def test_follower_gets_all_events_after_its_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(event_tail, "KEPT_LINES", 20)
    monkeypatch.setattr(event_tail, "STREAM_BYTES", 400)
    store, chance = Store(tmp_path / "lorad.db"), random.Random(seed)
    for name in "abc":
        new_run(store, name)
    told = Tail(store)
    for number in range(60):
        events.append(store, chance.choice("abc"), "step", {"step": number})
        if chance.random() < 0.5:
            told.after(told.newest, None)
    for run in (None, "a", "b"):
        for cursor in range(0, told.newest + 2, 3):
            expected = [line_of(row) for row in events.after(store, cursor, run)]
            assert followed(told, cursor, run) == expected
    store.close()


def followed(told: Tail, cursor: int, run: str | None) -> list[event_tail.Line]:
    found = []
    while lines := told.after(cursor, run):
        found += lines
        cursor = lines[-1].id
    return found


def test_run_sees_no_events_of_its_namesake(tmp_path: Path) -> None:
    store = Store(tmp_path / "lorad.db")
    new_run(store, "a")
    told = Tail(store)
    cursor = told.newest
    events.append(store, "a", "step", {"step": 2})
    with store.write() as connection:
        connection.execute("UPDATE runs SET first_event = ? WHERE name = 'a'", (cursor + 2,))
    events.append(store, "a", "step", {"step": 3})
    assert [b'"step":3' in line.text for line in told.after(cursor, "a")] == [True]
    assert len(told.after(cursor, None)) == 2
    store.close()
