"""An adapter belongs to the weights that it was made on: others with the same shapes are refused wherever it
goes.
"""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from lorad.daemon.runs.bases import bases_of, refuse_other_base
from lorad.errors import Conflict
from lorad.protocol.journal import AttemptFact, JournalWriter
from lorad.store import runs
from lorad.store.ingest import ingest
from tests.daemon.serving.test_serve import adapter_in, serve
from tests.kit.daemon_world import Api, behave, finished, serving

HERE, ELSEWHERE = "a" * 64, "b" * 64


def says(api: Api, name: str, sha256: str) -> None:
    """Journal in the run's newest attempt on which weights it trains."""
    run = runs.get(api.ctx.store, name)
    journal = Path(run.directory) / "journal.jsonl"
    with JournalWriter(journal, name, run.attempt) as writer:
        writer.append("attempt", 0, AttemptFact(1, 6, "tiny-1", "c", None, 1, model_sha256=sha256))
    ingest(api.ctx.store, name, journal)


async def test_versions_are_served_only_on_their_base(home: Path) -> None:
    behave(home, pool={"model_sha256": HERE})
    async with serving(home) as api:
        finished(api.ctx)
        says(api, "a", HERE)
        await api("swap", "bot", "a@1003")
        finished(api.ctx, "b")
        says(api, "b", ELSEWHERE)
        with pytest.raises(Conflict, match=r"alias bot still serves a@1003: the weights of .* were made on"):
            await api("swap", "bot", "b@1003")
        with pytest.raises(Conflict, match="were made on"):
            await api("serving", "b@1003")


async def test_imported_adapter_remembers_its_attested_base(home: Path, tmp_path: Path) -> None:
    behave(home, pool={"model_sha256": HERE})
    async with serving(home) as api:
        pool = api.ctx.pools[(await serve(api, bot=adapter_in(tmp_path / "bot"))).pool]
        run = runs.get(api.ctx.store, "bot")
        assert bases_of(api.ctx, run) == [{"model_sha256": HERE}]
        assert pool.status is not None
        pool.status = replace(pool.status, info=replace(pool.status.info, model_sha256=ELSEWHERE))
        with pytest.raises(Conflict, match="versions of bot were made on"):
            refuse_other_base(api.ctx, run, pool)


async def test_fork_receives_base_of_its_parent(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        says(api, "a", HERE)
        await api("fork", "a@1004", overrides=[], name="b", steps=None, fresh=False)
        await api.until("b", "ended")
        params = json.loads((home / "runs/b/attempts/0001/params.json").read_text())
        assert params["bases"][0] == {"model_sha256": HERE, "base_checksum": "c", "trainer": "", "sizes": {}}
