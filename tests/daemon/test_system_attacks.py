"""One user of a shared daemon tries to make others wait, or to have them see what is not so."""

import asyncio
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lorad.children.ask import under_guard
from lorad.daemon.api.verbs.trial import _play
from lorad.daemon.api.verbs.verify import attest_again
from lorad.daemon.process.sharing import SharedBox
from lorad.daemon.process.user_threads import Hands
from lorad.daemon.runs.draws import axes_of
from lorad.daemon.runs.preflight import answer, exchanged
from lorad.errors import Conflict, SpecError
from lorad.records.requests import TrialRequest
from lorad.records.samples import TrialEvent
from lorad.spec.model import convert
from lorad.store import runs
from tests.kit.daemon_world import finished, serving, until

ALICE, BOB = 4001, 4002


async def test_user_with_hanging_calls_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    hands, let_go = Hands(), threading.Event()
    monkeypatch.setattr("lorad.daemon.process.user_threads.MOST", 80)
    asked = [asyncio.create_task(hands.do(ALICE, let_go.wait)) for _ in range(80)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(hands.do(BOB, lambda: "done"), 10) == "done"
    with pytest.raises(Conflict):
        await hands.do(ALICE, lambda: "too much")
    let_go.set()
    assert all(await asyncio.gather(*asked))
    assert await hands.do(ALICE, lambda: "again") == "again"


def test_enormous_grid_is_refused_at_once() -> None:
    with pytest.raises(SpecError, match="more than 256 values"):
        axes_of([f"seed={','.join(map(str, range(1_000)))}"])


async def test_endlessly_printing_check_is_refused() -> None:
    endless = "while True: print('x' * 65536)"
    with pytest.raises(SpecError, match="printed over"):
        async with under_guard([sys.executable, "-c", endless], os.environ) as process:
            await exchanged(process, b"{}", list[str]().append)


async def test_check_that_is_killed_says_so() -> None:
    argv = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    async with under_guard(argv, os.environ) as process:
        said = await exchanged(process, b"{}", list[str]().append)
    with pytest.raises(SpecError, match="was killed: the machine may have no memory left"):
        answer(*said, process.returncode or 0)


@pytest.mark.parametrize(
    ("program", "says"),
    [('while True: print(\'{"kind":"phase","text":"x"}\')', ""), ("print([])", "something else")],
    ids=["endless", "no event"],
)
async def test_trial_waits_for_its_reader(home: Path, program: str, says: str) -> None:
    async with serving(home) as api:
        trial = (sys.executable, "-c", program)
        api.ctx.processes.commands = replace(api.ctx.processes.commands, trial=trial)
        events, spec = asyncio.Queue[TrialEvent](3), convert({"trainer": {"steps": 2}})
        body = TrialRequest("", "a.yaml", "/")
        work = asyncio.create_task(_play(api.ctx, os.getuid(), spec, body, events))
        answers = [await events.get() for _ in range(3)]
        if says:
            assert answers[-1].error is not None and says in answers[-1].error.message
        else:
            await until(events.full)
            assert not work.done() and answers[-1] == TrialEvent("phase", "x")
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def test_trial_needs_no_evaluation(home: Path) -> None:
    async with serving(home) as api:
        trial = (sys.executable, "-c", """print('{"kind":"end"}')""")
        api.ctx.processes.commands = replace(api.ctx.processes.commands, trial=trial)
        events, spec = asyncio.Queue[TrialEvent](), convert({"checkpoint": {"keep_best": 1}})
        await _play(api.ctx, os.getuid(), spec, TrialRequest("", "a.yaml", "/"), events)
        answers = [events.get_nowait() for _ in range(events.qsize())]
        assert answers[-1] == TrialEvent("end")


async def test_strange_file_names_do_not_stop_gc(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        spec = (
            "json_set(spec, '$.checkpoint.keep', 1, '$.checkpoint.keep_versions', 1, "
            "'$.checkpoint.keep_samples', 2)"
        )
        with api.ctx.store.write() as connection:
            connection.execute(f"UPDATE runs SET spec = {spec} WHERE name = 'a'")
        run = home / "runs" / "a"
        for name in (
            "samples/x.jsonl",
            "versions/\u00b2",
            f"checkpoints/{'9' * 30}-a1",
            "samples/000001-a0.jsonl/x",
        ):
            (run / name).mkdir(parents=True)
        (run / "versions" / ".tmp-loop").symlink_to(".tmp-loop")
        (run / "versions" / ".tmp-001001-deleted" / "x").mkdir(parents=True)
        await api("gc")
        there = {path.name for path in (run / "versions").iterdir()}
        assert "001006" in there and "001001" not in there


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it asks as another user")
async def test_foreign_pool_cannot_vouch_for_a_run(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        await api("swap", "bot", "a@1002")
        run, (pool,) = runs.get(api.ctx.store, "a"), api.ctx.pools.values()
        assert pool.status and "a@1002" in pool.status.loaded
        assert (await attest_again(api.ctx, run)).looked_at.startswith("1 version")
        api.ctx.users, pool.setup = SharedBox(), msgspec.structs.replace(pool.setup, owner=BOB)
        assert (await attest_again(api.ctx, run)).looked_at.startswith("0 versions")
