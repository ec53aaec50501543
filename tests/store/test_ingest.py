"""Ingest: every fact of a journal is in the index exactly once, whatever happened to either of them."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lorad.errors import IntegrityError, NotFound
from lorad.protocol.journal import EvalFact, JournalWriter, StepFact, lineage, read
from lorad.records.runs import Rates
from lorad.store import checkpoints, events, metrics, runs, versions
from lorad.store import ingest as ingesting
from lorad.store.db import Store
from lorad.store.ingest import ingest, ingest_some, refuse_foreign_journal
from lorad.store.rename import rename
from tests.kit.journals import (
    begin,
    checkpoint,
    end,
    evaluation,
    index_of,
    new_run,
    records_of,
    step,
    version,
    whole_run,
)
from tests.kit.sqlite_kill import killed_at_every_statement


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "lorad.db")
    new_run(store)
    yield store
    store.close()


@pytest.fixture(params=[1, 2, 200])
def portion(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Records taken in at once."""
    monkeypatch.setattr(ingesting, "PORTION", request.param)
    return int(request.param)


in_portions = pytest.mark.usefixtures("portion")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def told(store: Store) -> list[int]:
    """List the steps in the events."""
    return [event.data["step"] for event in events.after(store, 0) if event.kind == "step"]


def rebuilt(path: Path) -> dict[str, object]:
    """What an empty database makes of a journal."""
    empty = Store(path.with_name("empty.db"))
    new_run(empty)
    ingest(empty, "sorter", path)
    index = index_of(empty)
    empty.close()
    path.with_name("empty.db").unlink()
    return index


def test_facts_become_rows_events_and_a_summary(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
        evaluation(writer, 0, 0.1)
        step(writer, 1, reward=0.25)
        version(writer, 1, 1)
        evaluation(writer, 1, 0.6)
        checkpoint(writer, 1)
        end(writer, 1)
    assert [record.seq for record in ingest(store, "sorter", path)] == list(range(1, 8))
    run, (attempt,), (made,) = (
        runs.get(store, "sorter"),
        runs.attempts(store, "sorter"),
        versions.versions(store),
    )
    assert (run.step, run.reward, run.version, run.attempt) == (1, 0.25, 1, 1)
    assert (run.eval_first, run.eval_last) == (0.1, 0.6)
    assert run.rates == Rates(tokens_per_second=100.0, step_seconds=2.0)
    assert (attempt.reason, attempt.resumed_from) == ("completed", None)
    assert (made.path, made.pinned, made.aliases) == ("/runs/sorter/versions/000001", False, [])
    assert [event.kind for event in events.after(store, 1)] == [record.kind for record in records_of(path)]


def test_held_out_likelihood_reaches_the_run(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
        writer.append("eval", 0, EvalFact(0, None, 64, 0, nll=2.5))
        writer.append("eval", 4, EvalFact(1, None, 64, 0, nll=0.5, accuracy=0.75, token_accuracy=0.9))
    ingest(store, "sorter", path)
    run = runs.get(store, "sorter")
    assert (run.nll_first, run.nll_last, run.accuracy_last) == (2.5, 0.5, 0.75)
    assert [(e.nll, e.accuracy) for e in metrics.evals(store, "sorter")] == [(2.5, None), (0.5, 0.75)]
    assert (run.token_accuracy_last, metrics.evals(store, "sorter")[0].token_accuracy) == (0.9, None)


def test_a_run_without_samples_has_its_loss(store: Store, path: Path) -> None:
    measured = {"loss": 0.65, "pair_accuracy": 0.75, "reward_margin": 0.2}
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
        writer.append("step", 1, StepFact(0, ["p1"], 0, "", "", measured))
        ingest(store, "sorter", path)
        assert msgspec.to_builtins(runs.get(store, "sorter").signals).items() >= measured.items()
        writer.append("step", 2, StepFact(1, ["p2"], 1, "", "", {"loss": 0.01, "response_length": 9.0}))
    ingest(store, "sorter", path)
    assert "loss" not in msgspec.to_builtins(runs.get(store, "sorter").signals)


def test_an_eval_may_lack_the_likelihood(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
        writer.append("eval", 0, {"version": 0, "score": 0.5, "problems": 64, "failed": 0})
    ingest(store, "sorter", path)
    assert [(e.score, e.nll) for e in metrics.evals(store, "sorter")] == [(0.5, None)]


def test_the_same_journal_again_changes_nothing(store: Store, path: Path) -> None:
    whole_run(path, random.Random(0))
    ingest(store, "sorter", path)
    before = index_of(store), events.last_id(store)
    assert ingest(store, "sorter", path) == []
    assert (index_of(store), events.last_id(store)) == before


@in_portions
@pytest.mark.parametrize("seed", range(8))
def test_counting_rows_are_the_journals_lineage(store: Store, path: Path, seed: int) -> None:
    whole_run(path, random.Random(seed), attempts=4)
    ingest(store, "sorter", path)
    alive = lineage(records_of(path))

    def facts(kind: str) -> list[tuple[int, int]]:
        return sorted((record.step, record.attempt) for record in alive if record.kind == kind)

    assert sorted((row.step, row.attempt) for row in metrics.steps(store, "sorter")) == facts("step")
    assert sorted((row.step, row.attempt) for row in metrics.evals(store, "sorter")) == facts("eval")
    assert sorted((row.step, row.attempt) for row in checkpoints.checkpoints(store, "sorter")) == facts(
        "checkpoint"
    )
    surviving = [row for row in versions.versions(store, "sorter") if row.lineage]
    assert sorted((row.step, row.attempt) for row in surviving) == facts("version")
    made = [record.data["version"] for record in records_of(path) if record.kind == "version"]
    assert [row.version for row in versions.versions(store, "sorter")] == made  # those passed by stay


@pytest.mark.parametrize("seed", range(8))
def test_journal_in_pieces_equals_the_whole(store: Store, path: Path, seed: int) -> None:
    chance, growing = random.Random(seed), path.with_name("growing.jsonl")
    whole_run(path, chance)
    whole, new = path.read_bytes(), []
    for size in [*sorted(chance.choices(range(len(whole)), k=20)), len(whole)]:
        growing.write_bytes(whole[:size])
        new += ingest(store, "sorter", growing)
    assert new == records_of(path)
    assert index_of(store) == rebuilt(path)
    assert len(events.after(store, 1)) == len(new)


@in_portions
def test_a_rewind_takes_back_the_summary_too(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
        for number in (1, 2, 3):
            step(writer, number, reward=number / 10)
            version(writer, number, number)
            evaluation(writer, number, number / 100)
    with JournalWriter(path, "sorter", 2) as writer:
        begin(writer, resumed_from=1)
    ingest(store, "sorter", path)
    run = runs.get(store, "sorter")
    assert (run.step, run.reward, run.version, run.eval_last) == (1, 0.1, 1, 0.01)
    assert told(store) == [1, 2, 3]  # what happened, happened


@in_portions
def test_shortened_journal_is_rescanned_without_doubles(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        for number in (1, 2, 3):
            step(writer, number)
    ingest(store, "sorter", path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    assert ingest(store, "sorter", path) == []
    assert [row.step for row in metrics.steps(store, "sorter")] == [1, 2]
    assert told(store) == [1, 2, 3]
    assert index_of(store) == rebuilt(path)


@in_portions
def test_lost_record_is_replaced_by_its_successor(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        step(writer, 1)
        step(writer, 2, reward=0.2)
    ingest(store, "sorter", path)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with JournalWriter(path, "sorter", 2) as writer:
        begin(writer, resumed_from=0)
        step(writer, 1)
    assert [record.kind for record in ingest(store, "sorter", path)] == ["attempt", "rewind", "step"]
    assert [(row.step, row.attempt) for row in metrics.steps(store, "sorter")] == [(1, 2)]
    assert index_of(store) == rebuilt(path)


@in_portions
def test_a_rescan_keeps_what_only_the_daemon_knows(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        version(writer, 1, 1)
        checkpoint(writer, 1)
        version(writer, 2, 2)
        checkpoint(writer, 2)
    ingest(store, "sorter", path)
    with store.write() as connection:
        connection.execute("UPDATE versions SET pinned = 1")
    checkpoints.mark_deleted(store, "sorter", 1, 1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    ingest(store, "sorter", path)
    assert checkpoints.checkpoints(store, "sorter") == []
    assert [(row.pinned, row.lineage) for row in versions.versions(store)] == [(True, True), (True, True)]


@in_portions
def test_version_lost_from_the_journal_stays_uncounted(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        version(writer, 1, 1)
        version(writer, 2, 2)
    ingest(store, "sorter", path)
    with store.write() as connection:
        connection.execute("INSERT INTO aliases VALUES ('bot', 'sorter', 2, 0, 7)")
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    ingest(store, "sorter", path)
    found = [(row.version, row.lineage, row.aliases) for row in versions.versions(store)]
    assert found == [(1, True, []), (2, False, ["bot"])]
    assert runs.get(store, "sorter").version == 1


@in_portions
def test_a_doubled_record_counts_once(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        step(writer, 1)
        step(writer, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[0] + lines[1] + lines[0])
    ingest(store, "sorter", path)
    assert told(store) == [1, 2]


def test_records_behind_a_damaged_line_wait(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        for number in (1, 2, 3):
            step(writer, number)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"seq":2', b'"seq":9'))
    assert [record.seq for record in ingest(store, "sorter", path)] == [1]
    path.write_bytes(whole)
    assert [record.seq for record in ingest(store, "sorter", path)] == [2, 3]


def test_a_portion_is_bounded_by_its_bytes_too(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingesting, "PORTION_BYTES", 500)
    whole_run(path, random.Random(0))
    taken = ingest_some(store, "sorter", path)
    assert taken.more and taken.new == records_of(path)[: len(taken.new)] and taken.offset < 2000
    assert taken.new + ingest(store, "sorter", path) == records_of(path)


@pytest.mark.parametrize("seed", range(8))
def test_journal_cut_during_a_rescan_comes_right(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(ingesting, "PORTION", 2)
    chance = random.Random(seed)
    whole_run(path, chance)
    whole = path.read_bytes().splitlines(keepends=True)
    ingest(store, "sorter", path)
    for size, told in ((chance.randrange(5, len(whole)), [True, False]), (3, [True])):
        path.write_bytes(b"".join(whole[:size]))
        assert [ingest_some(store, "sorter", path).is_again for _ in told] == told
    path.write_bytes(b"".join(whole))
    assert ingest(store, "sorter", path) == []
    assert events.last_id(store) == 1 + len(whole) and index_of(store) == rebuilt(path)


def test_a_missing_journal_takes_nothing_away(store: Store, path: Path) -> None:
    assert ingest(store, "sorter", path) == []
    whole_run(path, random.Random(0))
    ingest(store, "sorter", path)
    before = index_of(store)
    path.unlink()
    assert ingest(store, "sorter", path) == []
    assert index_of(store) == before


def test_nan_metric_becomes_none(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        step(writer, 1, reward=float("nan"))
    ingest(store, "sorter", path)
    assert runs.get(store, "sorter").reward is None


def test_senseless_record_is_refused_with_its_number(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        step(writer, 1)
        writer.append("step", 2, {"version": "two"})
    with pytest.raises(IntegrityError, match="record 2 of the journal of run sorter: version is"):
        ingest(store, "sorter", path)
    assert metrics.steps(store, "sorter") == []


def test_journal_of_an_unknown_run_is_refused(store: Store, path: Path) -> None:
    whole_run(path, random.Random(0))
    with pytest.raises(NotFound):
        ingest(store, "stranger", path)


@pytest.mark.system
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_kill_9_during_ingest_loses_nothing(tmp_path: Path, path: Path, every: int) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
        step(writer, 1)
        version(writer, 1, 1)
    with JournalWriter(path, "sorter", 2) as writer:
        begin(writer, resumed_from=0)
        step(writer, 1)
        end(writer, 1)
    first = next(end for record, end in read(path) if record.kind == "step")
    template = tmp_path / "template.db"
    opened = Store(template)
    new_run(opened)
    part = path.with_name("part.jsonl")
    part.write_bytes(path.read_bytes()[:first])
    ingest(opened, "sorter", part)
    opened.close()

    def work(directory: Path) -> None:
        shutil.copy(template, directory / "lorad.db")
        ingest(Store(directory / "lorad.db"), "sorter", path)

    killed = killed_at_every_statement(work, tmp_path, every=every)
    assert len(killed) > 40 / every
    expected = rebuilt(path)
    for directory in killed:
        assert ingested_after_kill(directory, path) == expected


def ingested_after_kill(directory: Path, journal: Path) -> dict[str, object]:
    store, records = Store(directory / "lorad.db"), records_of(journal)
    found = events.last_id(store) - 1
    assert found in (2, len(records)), "a transaction was cut in two"
    assert ingest(store, "sorter", journal) == records[found:]
    assert events.last_id(store) == 1 + len(records)
    index = index_of(store)
    store.close()
    return index


def test_records_of_another_run_are_refused(store: Store, path: Path) -> None:
    whole_run(path, random.Random(1))
    ingest(store, "sorter", path)
    before = index_of(store)
    path.unlink()
    with JournalWriter(path, "other", 1) as writer:
        begin(writer)
        step(writer, 1)
    with pytest.raises(IntegrityError, match="has records of run other"):
        ingest_some(store, "sorter", path)
    assert index_of(store) == before


def test_records_of_an_earlier_name_are_the_runs(store: Store, path: Path) -> None:
    whole_run(path, random.Random(1))
    rename(store, "sorter", "sifter", directory="/runs/sifter", by="ada")
    ingest(store, "sifter", path)
    refuse_foreign_journal(store, "sifter", path)
    assert runs.get(store, "sifter").step
