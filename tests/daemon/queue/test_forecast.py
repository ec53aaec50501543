"""What `lorad check` says about the start is what the queue then does."""

import os
from pathlib import Path
from typing import Any

import pytest

from lorad.box.config import Limit, Queue
from lorad.cli.commands.specs.check import start_in_words
from lorad.daemon.context import Context, Request
from lorad.daemon.process.users import Caller
from lorad.daemon.queue.forecast import forecast
from lorad.daemon.queue.place import place_runs
from lorad.daemon.runs.create import create, make_directory
from lorad.records.checks import Start
from lorad.spec.model import convert, to_json
from lorad.states import RunState
from lorad.store import runs
from lorad.store.rows import RunRow
from tests.daemon.queue.test_simulate import busy
from tests.kit.daemon_world import open_context, submit


def foreseen(ctx: Context, model: str, **sections: Any) -> tuple[Start, str]:
    """The forecast of a run, and what the queue does with the same run: its pool, or why it waits."""
    spec = convert({"name": "new", "model": {"path": model}, **sections})
    directory = make_directory(ctx, spec, "", Request("/", "spec", [], model, "float32", 1000))
    row = RunRow(
        name="new",
        owner="me",
        owner_uid=os.getuid(),
        state=RunState.QUEUED,
        priority=spec.resources.priority,
        spec=to_json(spec).decode(),
        directory=str(directory),
    )
    before = [*runs.every(ctx.store)], [*ctx.pools]
    start = forecast(ctx, row)
    assert before == ([*runs.every(ctx.store)], [*ctx.pools])
    create(ctx, spec, directory, Caller(os.getuid(), "me"), warnings=[])
    place_runs(ctx)
    found = runs.get(ctx.store, "new")
    return start, found.waiting or str(found.pool)


def test_first_run_starts_in_a_new_pool(home: Path) -> None:
    start, _ = foreseen(open_context(home), "/models/one")
    assert (start.state, start.devices, start.pool, start.ahead) == ("now", ["cpu"], "", 0)


def test_run_of_the_same_base_joins_its_pool(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "a", model="/models/one")
    place_runs(ctx)
    start, pool = foreseen(ctx, "/models/one")
    assert (start.state, start.pool) == ("now", pool)


@pytest.mark.parametrize(
    ("model", "resources", "says"),
    [
        ("/models/other", {}, "busy with run a"),
        ("/models/one", {"exclusive": True}, "run a is in it"),
        ("/models/other", {"priority": 1}, "busy with run a"),
    ],
)
def test_a_run_that_would_wait_hears_why(
    home: Path, model: str, resources: dict[str, Any], says: str
) -> None:
    ctx = open_context(home)
    submit(ctx, "a", model="/models/one")
    place_runs(ctx)
    start, waiting = foreseen(ctx, model, resources=resources)
    assert start.state == "waits" and says in start.why and start.why == waiting
    assert start.stops == (["a"] if "priority" in resources else [])


def test_runs_before_it_in_the_queue_count(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "a", model="/models/one")
    place_runs(ctx)
    submit(ctx, "b", model="/models/one", resources={"exclusive": True})
    place_runs(ctx)
    start, waiting = foreseen(ctx, "/models/one")
    assert (start.ahead, start.why) == (1, waiting) and "run b is next on cpu" in waiting


def test_check_says_when_a_run_would_start(home: Path) -> None:
    ctx = busy(home)
    start, _ = foreseen(ctx, "/models/b")
    assert (start.state, start.after) == ("waits", "a") and start.starts_at is not None
    words = start_in_words(start)
    assert "after a; it waits: pool a-1 is busy with run a" in words


def test_limits_of_its_user_count(home: Path) -> None:
    ctx = open_context(home, queue=Queue(limits=Limit(runs=1)))
    submit(ctx, "a", model="/models/one")
    place_runs(ctx)
    start, waiting = foreseen(ctx, "/models/one")
    assert start.why == waiting == "me has 1 of 1 runs working"


def test_run_that_no_pool_can_take_hears_so(home: Path) -> None:
    start, _ = foreseen(open_context(home), "/models/one", lora={"rank": 1000})
    assert start.state == "never" and "adapters up to rank 512" in start.why
