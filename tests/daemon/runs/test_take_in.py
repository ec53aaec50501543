"""Whatever a run writes into its journal, however much, holds up nobody, and is believed while it makes
sense.
"""

from pathlib import Path

import pytest

from lorad.daemon.runs.take_in import MOST_CUTS, is_taken_in, take_in
from lorad.errors import IntegrityError
from lorad.store import ingest as ingesting
from lorad.store import metrics
from tests.kit.daemon_world import finished, open_context, reconciling, submit, until_state


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingesting, "PORTION", 3)


async def test_run_settles_once_all_facts_are_ingested(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        run = await until_state(ctx, "a", "ended")
        assert (run.reason, run.step, run.version) == ("completed", 6, 1006)
        assert len(metrics.steps(ctx.store, "a")) == 6 and not ctx.storage.last_words


def test_repeatedly_rewritten_journal_is_not_believed(home: Path) -> None:
    ctx = open_context(home)
    run = finished(ctx)
    journal = run.dir.journal
    lines = journal.read_bytes().splitlines(keepends=True)
    for size in range(10, 10 - MOST_CUTS, -1):
        journal.write_bytes(b"".join(lines[:size]))
        while take_in(ctx, run).more:
            pass
    journal.write_bytes(b"".join(lines[:5]))
    with pytest.raises(IntegrityError, match="keeps being rewritten"):
        take_in(ctx, run)


def test_late_writes_by_others_are_not_awaited(home: Path) -> None:
    ctx = open_context(home)
    run = finished(ctx)
    journal = run.dir.journal
    lines = journal.read_bytes().splitlines(keepends=True)
    with ctx.store.write() as connection:
        connection.execute("DELETE FROM journal_offsets")
    answers = []
    for size in range(6, len(lines)):
        journal.write_bytes(b"".join(lines[:size]))
        answers.append(is_taken_in(ctx, run))
    assert answers[:2] == [False, True]
