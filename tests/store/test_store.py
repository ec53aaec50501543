"""The store: one writer, moves as compare-and-swap with their events, and the rows that clients see."""

import errno
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from lorad.errors import Conflict, NotFound
from lorad.protocol.journal import JournalWriter
from lorad.states import MOVES, EndReason, Move, RunState
from lorad.store import aliases, checkpoints, events, ingest, metrics, pools, runs, versions
from lorad.store.db import Store
from tests.kit.journals import begin, checkpoint, new_run, step, version

EVERY_MOVE = [(state, move) for state in RunState for move in Move]


def target(state: RunState, move: Move) -> RunState | None:
    return MOVES[move].get(state)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "lorad.db")
    yield store
    store.close()


def bring(store: Store, name: str, state: RunState) -> None:
    """A new run in `state`, by allowed moves."""
    new_run(store, name)
    ways = {
        RunState.QUEUED: (),
        RunState.STARTING: (Move.PLACE,),
        RunState.RUNNING: (Move.PLACE, Move.CONFIRM),
        RunState.STOPPING: (Move.PLACE, Move.STOP),
        RunState.PAUSED: (Move.PAUSE,),
        RunState.ENDED: (Move.END,),
    }
    for move in ways[state]:
        make(store, name, move)


def make(store: Store, name: str, move: Move, *, expect: RunState | None = None) -> RunState:
    reason = EndReason.FAILED if move is Move.END else None
    return RunState(runs.move(store, name, move, expect=expect, reason=reason, detail="why").state)


# -- moves ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("state", "move"), [pair for pair in EVERY_MOVE if target(*pair)])
def test_allowed_move_changes_state_with_one_event(store: Store, state: RunState, move: Move) -> None:
    bring(store, "sorter", state)
    seen = events.last_id(store)
    assert make(store, "sorter", move) is target(state, move)
    (event,) = events.after(store, seen, "sorter")
    assert (event.kind, event.data["from"], event.data["state"]) == ("state", state, target(state, move))


@pytest.mark.parametrize(("state", "move"), [pair for pair in EVERY_MOVE if not target(*pair)])
def test_forbidden_move_says_what_is_allowed(store: Store, state: RunState, move: Move) -> None:
    bring(store, "sorter", state)
    before = runs.get(store, "sorter"), events.last_id(store)
    allowed = ", ".join(move for move in Move if state in MOVES[move])
    with pytest.raises(
        Conflict, match=f"^run sorter is {state}: {move} is not possible; possible now: {allowed}$"
    ):
        make(store, "sorter", move)
    assert (runs.get(store, "sorter"), events.last_id(store)) == before


def test_move_from_an_unexpected_state_is_refused(store: Store) -> None:
    bring(store, "sorter", RunState.RUNNING)
    with pytest.raises(Conflict, match="run sorter is running, not starting"):
        make(store, "sorter", Move.STOP, expect=RunState.STARTING)
    assert make(store, "sorter", Move.STOP, expect=RunState.RUNNING) is RunState.STOPPING


def test_only_an_end_has_a_reason(store: Store) -> None:
    new_run(store)
    with pytest.raises(ValueError, match="ends with a reason"):
        runs.move(store, "sorter", Move.END)
    with pytest.raises(ValueError, match="ends with a reason"):
        runs.move(store, "sorter", Move.PLACE, reason=EndReason.LOST)


@pytest.mark.parametrize("seed", range(3))
def test_events_replay_to_the_states(store: Store, seed: int) -> None:
    chance, names = random.Random(seed), ["a", "b", "c"]
    states = {name: RunState(new_run(store, name).state) for name in names}
    for _ in range(80):
        name, move = chance.choice(names), chance.choice(list(Move))
        if to := target(states[name], move):
            states[name] = make(store, name, move)
            assert states[name] is to
        else:
            with pytest.raises(Conflict):
                make(store, name, move)
    told = {event.run: event.data["state"] for event in events.after(store, 0, limit=10**6)}
    assert told == states == {run.name: run.state for run in runs.list_runs(store, all=True)}


def test_a_state_without_its_event_never_commits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    new_run(store)

    def fail(*_: object, **__: object) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(events, "add", fail)
    with pytest.raises(sqlite3.OperationalError):
        make(store, "sorter", Move.PLACE)
    assert runs.get(store, "sorter").state == RunState.QUEUED


def test_move_by_another_process_is_not_overwritten(store: Store) -> None:
    new_run(store)
    other = Store(store.path)
    assert make(other, "sorter", Move.PLACE) is RunState.STARTING
    other.close()
    with pytest.raises(Conflict, match="is starting: place is not possible"):
        make(store, "sorter", Move.PLACE)


def test_run_keeps_first_start_and_last_end(store: Store) -> None:
    bring(store, "sorter", RunState.RUNNING)
    started = runs.get(store, "sorter").started_at
    make(store, "sorter", Move.END)
    ended = runs.get(store, "sorter")
    assert (
        started
        and ended.ended_at
        and ended.ended_at >= started
        and (ended.reason, ended.detail) == ("failed", "why")
    )
    make(store, "sorter", Move.RESUME)
    make(store, "sorter", Move.PLACE)
    again = runs.get(store, "sorter")
    assert (again.started_at, again.ended_at, again.reason, again.detail) == (started, None, None, "")


# -- runs ----------------------------------------------------------------------------------------------------
def test_name_in_use_is_free_after_removal(store: Store) -> None:
    bring(store, "sorter", RunState.ENDED)
    with pytest.raises(Conflict, match="there is a run named sorter"):
        new_run(store)
    runs.remove(store, "sorter")
    new_run(store)
    assert [event.data["state"] for event in events.after(store, 0, "sorter")] == ["queued"]
    assert len(events.after(store, 0)) == 4  # the first sorter's are still there


@pytest.mark.parametrize("state", [state for state in RunState if not state.is_over])
def test_unfinished_run_cannot_be_removed(store: Store, state: RunState) -> None:
    bring(store, "sorter", state)
    with pytest.raises(Conflict, match=f"run sorter is {state}"):
        runs.remove(store, "sorter")
    assert runs.get(store, "sorter").state == state


def test_removal_leaves_no_row_behind(store: Store, tmp_path: Path) -> None:
    new_run(store)
    with JournalWriter(tmp_path / "journal.jsonl", "sorter", 1) as writer:
        begin(writer)
        step(writer, 1)
        version(writer, 1, 1)
        checkpoint(writer, 1)
    ingest.ingest(store, "sorter", tmp_path / "journal.jsonl")
    make(store, "sorter", Move.END)
    runs.remove(store, "sorter")
    for table in ("runs", "attempts", "steps", "versions", "checkpoints", "journal_offsets"):
        assert store.rows(f"SELECT * FROM {table}") == []


def test_aliased_version_keeps_its_run(store: Store, tmp_path: Path) -> None:
    run = new_run(store)
    with JournalWriter(tmp_path / "journal.jsonl", "sorter", 1) as writer:
        version(writer, 1, 1)
    ingest.ingest(store, "sorter", tmp_path / "journal.jsonl")
    make(store, "sorter", Move.END)
    aliases.move(store, "bot", "sorter", 1, by="ada", uid=run.owner_uid)
    with pytest.raises(Conflict, match="alias bot serves a version of run sorter"):
        runs.remove(store, "sorter")
    assert versions.get_version(store, "sorter", 1).aliases == ["bot"]


def test_lists_go_by_age_queues_by_priority(store: Store) -> None:
    for name, priority in (("old", 0), ("urgent", 5), ("young", 0)):
        runs.create(store, name=name, owner="ada", spec_json="{}", directory="/r", steps=1, priority=priority)
    assert [run.name for run in runs.list_runs(store, all=False)] == ["young", "urgent", "old"]
    assert [run.name for run in runs.in_states(store, RunState.QUEUED)] == ["urgent", "old", "young"]


def test_clock_that_was_ahead_displaces_no_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its place in the queue, and all that happens to it later is its own."""
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 1e10)
        new_run(store, "early")
    new_run(store, "late")
    assert [run.name for run in runs.in_states(store, RunState.QUEUED)] == ["early", "late"]
    assert [run.name for run in runs.queue(store)] == ["early", "late"]
    for move in (Move.PLACE, Move.END, Move.RESTART):
        make(store, "early", move)
    assert runs.restarts(store, "early") == 1
    events.append(store, "early", "warning", {"says": "hot"})
    assert events.of_kind(store, "early", "warning") == [{"says": "hot"}]


def test_listed_runs_have_models_but_no_specs(store: Store) -> None:
    spec = '{"model": {"path": "/models/qwen"}}'
    runs.create(store, name="a", owner="ada", spec_json=spec, directory="/r", steps=1, priority=0)
    for rows in (runs.list_runs(store, all=False), runs.list_named(store, ["a"])):
        assert [(row.name, row.base, hasattr(row, "spec")) for row in rows] == [("a", "/models/qwen", False)]


def test_old_runs_are_listed_only_on_request(store: Store) -> None:
    bring(store, "sorter", RunState.ENDED)
    with store.write() as connection:
        connection.execute("UPDATE runs SET ended_at = ended_at - 90000")
    assert runs.list_runs(store, all=False) == []
    assert [run.name for run in runs.list_runs(store, all=True)] == ["sorter"]


def test_what_is_not_there_is_not_found(store: Store) -> None:
    for call in (
        lambda: runs.get(store, "x"),
        lambda: runs.move(store, "x", Move.PLACE),
        lambda: runs.set_fields(store, "x", waiting="for a device"),
        lambda: runs.begin_attempt(store, "x", resumed_from=None),
        lambda: runs.remove(store, "x"),
        lambda: versions.get_version(store, "x", 1),
        lambda: pools.get(store, "x"),
    ):
        with pytest.raises(NotFound):
            call()


def test_fields_of_moves_and_journals_cannot_be_set(store: Store) -> None:
    new_run(store)
    runs.set_fields(
        store, "sorter", waiting="for a device", wanted="pause", pool="p", steps=20, resume_step=5
    )
    assert runs.get(store, "sorter").waiting == "for a device"
    for column in ("state", "step", "reward", "name = name; --"):
        with pytest.raises(ValueError, match="not to be set here"):
            runs.set_fields(store, "sorter", **{column: 1})


def test_placed_run_says_what_it_waits_for(store: Store) -> None:
    new_run(store)
    placed = runs.place(store, "sorter", "tiny-1", waiting="pool tiny-1 starts sglang", resumed_from=None)
    assert (placed.state, placed.pool, placed.attempt) == (RunState.STARTING, "tiny-1", 1)
    assert placed.waiting == "pool tiny-1 starts sglang"
    assert runs.move(store, "sorter", Move.CONFIRM).waiting == ""


def test_attempts_are_numbered_and_their_first_end_counts(store: Store) -> None:
    new_run(store)
    assert [runs.begin_attempt(store, "sorter", resumed_from=start) for start in (None, 4)] == [1, 2]
    runs.end_attempt(store, "sorter", 1, exit_code=None, signal=9, reason="lost")
    runs.end_attempt(store, "sorter", 1, exit_code=0, signal=None, reason="completed")
    first, second = runs.attempts(store, "sorter")
    assert (first.signal, first.reason, second.resumed_from, second.ended_at) == (9, "lost", 4, None)
    assert runs.get(store, "sorter").attempt == 2


def test_a_deleted_checkpoint_is_no_longer_offered(store: Store, tmp_path: Path) -> None:
    new_run(store)
    with JournalWriter(tmp_path / "journal.jsonl", "sorter", 1) as writer:
        checkpoint(writer, 1)
        checkpoint(writer, 2)
    ingest.ingest(store, "sorter", tmp_path / "journal.jsonl")
    checkpoints.mark_deleted(store, "sorter", 1, 1)
    paths = [row.path for row in checkpoints.checkpoints(store, "sorter")]
    assert paths == ["/runs/sorter/checkpoints/000002-a1"]


def test_pages_of_steps_join_without_gap_or_double(store: Store, tmp_path: Path) -> None:
    new_run(store)
    with JournalWriter(tmp_path / "journal.jsonl", "sorter", 1) as writer:
        for number in range(1, 8):
            step(writer, number)
    ingest.ingest(store, "sorter", tmp_path / "journal.jsonl")
    first = metrics.steps(store, "sorter", limit=3)
    rest = metrics.steps(store, "sorter", after=first[-1].step)
    assert [row.step for row in first + rest] == list(range(1, 8))
    assert first[0].metrics["reward"] == 0.5


def test_sparse_steps_are_multiples_and_the_last(store: Store, tmp_path: Path) -> None:
    new_run(store)
    with JournalWriter(tmp_path / "journal.jsonl", "sorter", 1) as writer:
        for number in range(1, 12):
            step(writer, number)
    ingest.ingest(store, "sorter", tmp_path / "journal.jsonl")
    assert [row.step for row in metrics.sparse_steps(store, "sorter", 3)] == [3, 6, 9, 11]
    assert [row.step for row in metrics.sparse_steps(store, "sorter", 3, limit=2)] == [3, 6, 11]
    assert [row.step for row in metrics.sparse_steps(store, "sorter", 3, after=6)] == [9, 11]
    assert metrics.sparse_steps(store, "sorter", 3, after=11) == []
    assert metrics.sparse_steps(store, "sorter", 2**62, after=2**63 - 1) == []


# -- pools and events ----------------------------------------------------------------------------------------
def test_a_pool_goes_with_its_leases(store: Store) -> None:
    made = pools.upsert(
        store, "tiny-1", state="starting", model="builtin:tiny", mode="fused", device="cpu", pid=7
    )
    pools.lease(store, "tiny-1", "cpu", "run sorter")
    assert pools.upsert(store, "tiny-1", state="ready") == structs.replace(made, state="ready")
    assert [(row.device, row.pool) for row in pools.leases(store)] == [("cpu", "tiny-1")]
    pools.remove(store, "tiny-1")
    assert (pools.list_pools(store), pools.leases(store)) == ([], [])


def test_events_can_be_neither_changed_nor_deleted(store: Store) -> None:
    new_run(store)
    for sql in ("UPDATE events SET kind = 'x'", "DELETE FROM events"):
        with pytest.raises(sqlite3.IntegrityError, match="events never"), store.write() as connection:
            connection.execute(sql)


def test_only_a_renamed_home_counts_as_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    store = Store(home / "lorad.db")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", failing)
        found = [store.is_moved]
    found.append(store.is_moved)
    home.rename(tmp_path / "new")
    found.append(store.is_moved)
    home.mkdir()  # another one of its name
    found.append(store.is_moved)
    store.close()
    assert found == [False, False, True, True]


def failing(path: Path, **_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
