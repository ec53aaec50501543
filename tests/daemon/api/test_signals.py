"""What a dashboard sees of every run at once: signals of the last step and recent rewards, wherever they come
from.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from lorad.daemon.api.views import of_row, run_view
from lorad.errors import NotFound, SpecError
from lorad.protocol.journal import JournalWriter, StepFact
from lorad.records.runs import Event
from lorad.spec.model import convert
from lorad.store import events, facts, runs
from lorad.store.db import Store
from lorad.store.ingest import ingest
from tests.kit.daemon_world import finished, serving
from tests.kit.journals import begin, new_run, version

MEASURED = {"kl": 0.25, "entropy": 1.5, "truncated": 0.125, "logprob_difference": 0.01, "failed_rewards": 2.0}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "lorad.db")
    new_run(store)
    yield store
    store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def stepped(writer: JournalWriter, number: int, reward: float = 0.5, **metrics: float) -> None:
    measured = {"reward": reward, "seconds": 2.0, "tokens_per_second": 100.0} | metrics
    writer.append("step", number, StepFact(number, ["p1"], number, f"samples/{number}", "ab", measured))


def told(store: Store, key: str) -> Any:
    return msgspec.json.decode(msgspec.json.encode(run_view(cast("Any", None), runs.get(store, "sorter"))))[
        key
    ]


def test_signals_describe_last_step_and_current_version(store: Store, path: Path) -> None:
    runs.set_fields(store, "sorter", spec='{"data": {"prompts_per_step": 4}}')
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
        stepped(writer, 1, kl=9.0)
        stepped(writer, 2, zero_variance_groups=3.0, **MEASURED)
        version(writer, 2, 1)
    first, _, last, _ = ingest(store, "sorter", path)
    times = {"begun": pytest.approx(first.at), "at": last.at}
    assert told(store, "signals") == MEASURED | times | {"zero_variance": 0.75, "attested": "passed"}


def test_non_finite_metrics_are_listed_by_name(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
        stepped(writer, 1, reward=float("nan"), kl=float("inf"), entropy=1.0)
    ingest(store, "sorter", path)
    signals = told(store, "signals")
    assert (signals["not_finite"], signals["entropy"], "kl" in signals) == (["kl", "reward"], 1.0, False)
    assert told(store, "recent") == [None]


def test_malformed_metrics_do_not_spoil_the_others(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
        stepped(writer, 1, kl="x", zero_variance_groups=[1], entropy=10**400, truncated=0.5)  # type: ignore[arg-type]
    ingest(store, "sorter", path)
    signals = told(store, "signals")
    assert (runs.get(store, "sorter").step, signals["truncated"]) == (1, 0.5)
    assert not {"kl", "entropy", "zero_variance"} & set(signals)


def test_recent_rewards_are_the_last_ones_newest_last(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
        for number in range(1, facts.RECENT + 7):
            stepped(writer, number, reward=number / 64)
    ingest(store, "sorter", path)
    assert told(store, "recent") == [number / 64 for number in range(7, facts.RECENT + 7)]


def test_a_rewind_takes_signals_and_rewards_back(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
        stepped(writer, 1, reward=0.25, kl=0.5)
        stepped(writer, 2, reward=0.75, kl=5.0)
    ingest(store, "sorter", path)
    with JournalWriter(path, "sorter", 2) as writer:
        begin(writer, resumed_from=1)
    ingest(store, "sorter", path)
    assert told(store, "recent") == [0.25] and told(store, "signals")["kl"] == 0.5


def test_a_run_without_steps_has_no_signals(store: Store, path: Path) -> None:
    assert (told(store, "signals"), told(store, "recent")) == ({}, [])


def test_attempt_shows_its_start_before_any_step(store: Store, path: Path) -> None:
    with JournalWriter(path, "sorter", 1) as writer:
        begin(writer)
    (record,) = ingest(store, "sorter", path)
    assert told(store, "signals") == {"begun": pytest.approx(record.at)}


def test_run_name_with_comma_is_refused() -> None:
    with pytest.raises(SpecError):
        convert({"name": "a,b"})


async def test_runs_asked_by_name_come_newest_first(home: Path) -> None:
    async with serving(home) as api:
        for name in ("a", "b", "c"):
            finished(api.ctx, name)
        assert [run.name for run in await api("named", ["a", "c", "gone", "a"])] == ["c", "a"]
        assert await api("named", ["gone"]) == await api("named", []) == []
        assert [run.name for run in await api("named", [*(f"no-{n}" for n in range(99)), "a", "b"])] == ["a"]
        (run,) = await api("named", ["a"])
        assert run == (await api("list", all=True))[-1] and len(run.recent) == 6 and run.signals.at
        shown = await api("show", "a")
        assert (shown.signals, shown.recent) == (run.signals, run.recent)


async def test_history_is_the_last_events_oldest_first(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx, "a")
        finished(api.ctx, "b")
        everything = [of_row(Event, row) for row in events.after(api.ctx.store, 0)]
        assert await api("history", limit=5) == everything[-5:]
        assert await api("history", "a", limit=1000) == [event for event in everything if event.run == "a"]
        assert await api("history", limit=0) == []
        with pytest.raises(NotFound):
            await api("history", "gone")


async def test_history_of_reused_name_covers_newest_run(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx, "a")
        await api("remove", "a")
        finished(api.ctx, "a")
        kinds = [event.kind for event in await api("history", "a")]
        assert "removed" not in kinds and kinds.count("attempt") == 1


async def test_status_shows_caller_and_disk_space(home: Path) -> None:
    async with serving(home) as api:
        status = await api("status")
        assert status.caller.admin is True and status.caller.user
        assert 0 < status.disk.free <= status.disk.total
