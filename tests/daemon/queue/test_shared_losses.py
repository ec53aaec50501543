"""What the end of a run or a pool means for the others in it."""

import functools
import json
from pathlib import Path

import pytest

from lorad.daemon.context import Context
from lorad.daemon.pools.life import stop_pool
from lorad.daemon.queue.restart import excuse, futile_attempts
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.rows import RunRow
from tests.kit.daemon_world import behave, finished, open_context, reconciling, submit, until, until_state
from tests.kit.fakes.daemon_fakes import FACTS

AGAIN = {"restart": "on-failure"}


def row(ctx: Context, name: str) -> RunRow:
    return runs.get(ctx.store, name)


@pytest.mark.system
async def test_the_youngest_of_a_lost_pool_ends_first(home: Path) -> None:
    behave(home, driver={"seconds": 60.0})
    async with reconciling(home) as ctx:
        for name in "ab":
            submit(ctx, name, resources=AGAIN)
        for attempt in (1, 2, 3):
            await until(functools.partial(both_run, ctx, attempt))
            ctx.processes.kill_group(ctx.pools["tiny-1"].attempt())
        assert "3 attempts got no further" in (await until_state(ctx, "b", "ended")).detail
        behave(home, driver={"seconds": 0.5})
        await until(lambda: (row(ctx, "a").state, row(ctx, "a").attempt) == ("running", 4))
        behave(home)
        ctx.processes.kill_group(ctx.pools["tiny-1"].attempt())
        assert (await until_state(ctx, "a", "ended")).reason == "completed"


async def test_a_neighbour_that_gets_on_excuses_nobody(home: Path) -> None:
    behave(home, driver={"seconds": 60.0})
    async with reconciling(home) as ctx:
        submit(ctx, "a", resources=AGAIN)
        await until_state(ctx, "a", "running")
        behave(home, driver={"seconds": 0.3})
        submit(ctx, "b", resources=AGAIN, trainer={"steps": 1000})
        await until(lambda: row(ctx, "b").step >= 1)
        ctx.processes.kill_group(ctx.pools["tiny-1"].attempt())
        await until(lambda: row(ctx, "a").attempt == row(ctx, "b").attempt == 2)
        assert futile_attempts(ctx, "a", before=2) == 1 and futile_attempts(ctx, "b", before=2) == 0


def test_a_neighbour_that_returned_sooner_excuses_too(home: Path) -> None:
    ctx = open_context(home)
    for name in "ab":
        submit(ctx, name)
    for name, life in (("a", 1), ("b", 1), ("b", 2)):
        attempt = runs.place(ctx.store, name, "tiny-1", waiting="", resumed_from=None).attempt_dir
        attempt.root.mkdir(parents=True)
        attempt.command.write_text(json.dumps({"pool_attempt": life}))
        runs.end_attempt(ctx.store, name, life, exit_code=None, signal=9, reason="lost")
        if (name, life) == ("b", 1):
            runs.move(ctx.store, name, Move.END, reason=EndReason.LOST)
            runs.move(ctx.store, name, Move.RESTART)
    excuse(ctx, row(ctx, "b"))
    assert futile_attempts(ctx, "b") == 2
    excuse(ctx, row(ctx, "a"))
    assert futile_attempts(ctx, "a") == 0


@pytest.mark.system
async def test_a_run_with_younger_neighbours_ends_too(home: Path) -> None:
    behave(home, driver={"seconds": 60.0})
    async with reconciling(home) as ctx:
        submit(ctx, "a", resources=AGAIN | {"max_restarts": 1})
        submit(ctx, "b", resources=AGAIN)
        for attempt in (1, 2):
            await until(functools.partial(both_run, ctx, attempt))
            ctx.processes.kill_group(ctx.pools["tiny-1"].attempt())
        assert "no more restarts after 1" in (await until_state(ctx, "a", "ended")).detail
        assert futile_attempts(ctx, "a") == 0
        await until(lambda: (row(ctx, "b").state, row(ctx, "b").attempt) == ("running", 3))


def both_run(ctx: Context, attempt: int) -> bool:
    return all((row(ctx, name).state, row(ctx, name).attempt) == ("running", attempt) for name in "ab")


async def test_lost_run_leaves_its_pool_to_others(home: Path) -> None:
    behave(home, driver={"seconds": 0.3})
    async with reconciling(home) as ctx:
        submit(ctx, "a", trainer={"steps": 15})
        await until_state(ctx, "a", "running")
        behave(home, driver={"lost_at": 2})
        submit(ctx, "b")
        assert (await until_state(ctx, "b", "ended")).reason == "lost"
        assert (await until_state(ctx, "a", "ended")).reason == "completed"
        assert ctx.pools["tiny-1"].number == 1


async def test_deaf_pool_with_hanging_runs_is_ended(home: Path) -> None:
    behave(home, driver={"hang": True, "seconds": 60.0}, pool={"deaf": True})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "running")
        stop_pool(ctx, ctx.pools["tiny-1"])
        assert (await until_state(ctx, "a", "ended")).reason == "lost"


async def test_run_without_backend_spares_pins_of_others(home: Path) -> None:
    async with reconciling(home) as ctx:
        finished(ctx, "a")
        finished(ctx, "b")
        request = home / "runs/a/request.json"
        request.write_text(json.dumps(json.loads(request.read_text()) | {"facts": FACTS}))
        with ctx.store.write() as connection:
            connection.execute(
                "UPDATE runs SET spec = json_set(spec, '$.rollout.backend', 'vllm') WHERE name = 'a'"
            )
            connection.execute("UPDATE versions SET pinned = 1 WHERE version = 1006")
        submit(ctx, "c", FACTS["model_path"])
        await until_state(ctx, "c", "ended")
        await until(lambda: (status := ctx.pools["tiny-1"].status) and status.kept == ["b@1006"])


async def test_tenant_without_files_keeps_nobody_out(home: Path) -> None:
    behave(home, driver={"seconds": 5.0})
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "running")
        (home / "runs/a/request.json").unlink()
        submit(ctx, "b")
        await until_state(ctx, "b", "running")
