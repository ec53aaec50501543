"""What texts name for who reads them, in a daemon where only owners see what is theirs."""

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lorad.box.config import Sharing
from lorad.daemon.access import Reader, anybody, find_alias, find_run, name_for
from lorad.daemon.api.verbs.logs import log_of
from lorad.daemon.api.views import run_view
from lorad.daemon.context import Context
from lorad.daemon.process.sharing import SharedBox, Users
from lorad.daemon.process.users import Caller
from lorad.daemon.queue.device_holders import holder_of_pool
from lorad.daemon.queue.forecast import keep_forecasts
from lorad.daemon.queue.place import place_runs
from lorad.daemon.queue.restart import queue_again
from lorad.daemon.services import gateway
from lorad.errors import NotFound
from lorad.states import Move
from lorad.store import aliases, events, runs
from lorad.store.rows import QueuedRow, RunRow
from tests.daemon.queue.test_limits import owned
from tests.daemon.queue.test_simulate import works
from tests.kit.daemon_world import finished, open_context

ANN, EVE = 4001, 4002  # whose names are their numbers: they are in no /etc/passwd
BUSY = "a pool of 4002's is busy with a run of 4002's; starts when it ends"


@pytest.fixture
def ctx(home: Path) -> Context:
    made = open_context(home, sharing=Sharing("owner"))
    made.users = SharedBox()
    return made


def submit_as(ctx: Context, uid: int, name: str, **sections: Any) -> RunRow:
    owned(ctx, str(uid), uid, name, model=f"/models/{name}", **sections)
    place_runs(ctx)
    return runs.get(ctx.store, name)


def test_hidden_is_looked_up_as_missing(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of it is read: who waits for the answer cannot tell the two from the time that it takes."""
    finished(ctx, "zq")
    with ctx.store.write() as connection:
        connection.execute("UPDATE runs SET owner_uid = ?", (ANN,))
    aliases.move(ctx.store, "bot", "zq", 1001, by="ann", uid=ANN)
    assert find_run(ctx, Caller(ANN, "ann"), "zq").owner_uid == ANN
    assert find_alias(ctx, Caller(ANN, "ann"), "bot")
    monkeypatch.setattr(runs, "decode_run", None)
    monkeypatch.setattr(aliases, "Alias", None)
    with pytest.raises(NotFound):
        find_run(ctx, Caller(EVE, "eve"), "zq")
    assert find_alias(ctx, Caller(EVE, "eve"), "bot") is None


def test_gateway_of_hidden_runs_is_the_callers(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but root can connect to the one for tokens."""
    monkeypatch.setattr(gateway, "answers", lambda socket: True)
    found = [gateway.gateway_address(ctx, Caller(uid, "x"))["gateway"] for uid in (ANN, os.geteuid())]
    assert found == [str(ctx.home.gateway_socket_of(ANN)), str(ctx.home.gateway_socket)]


@pytest.mark.parametrize(
    ("owners", "says"),
    [
        ("e", "run r0"),
        ("eee", "runs r0, r1 and r2"),
        ("eeeeee", "runs r0, r1 and 4 others"),
        ("a", "a run of ann's"),
        ("ea", "run r0 and a run of ann's"),
        ("aaee", "runs r2 and r3 and 2 runs of ann's"),
    ],
)
def test_runs_are_named_to_their_owner_alone(owners: str, says: str) -> None:
    people = {"e": (EVE, "eve"), "a": (ANN, "ann")}
    rows = [
        QueuedRow(f"r{number}", people[one][0], 0, "", people[one][1]) for number, one in enumerate(owners)
    ]
    assert Reader(EVE, sees_all=False).name_all(rows) == says
    assert "ann" not in Reader(EVE, sees_all=True).name_all(rows)


def test_preemption_names_no_run_of_another(ctx: Context) -> None:
    submit_as(ctx, EVE, "low")
    high = submit_as(ctx, ANN, "high", resources={"priority": 5})
    low = runs.get(ctx.store, "low")
    assert (low.preempted, high.waiting) == ("high", BUSY)
    assert run_view(ctx, low).waiting == "being preempted by a run of 4001's"
    with ctx.store.write():
        runs.move(ctx.store, "low", Move.PAUSE)
        queue_again(ctx, low)
    details = [event.data.get("detail") for event in events.after(ctx.store, 0, "low")]
    assert details[-3:] == ["preempted by a run of 4001's", "", "preempted by a run of 4001's"]
    assert name_for(ctx, low, "gone") == "another run"


def test_forecast_names_no_run_of_another(ctx: Context) -> None:
    submit_as(ctx, ANN, "theirs", trainer={"steps": 60})
    works(ctx, "theirs", 20, 10.0)
    submit_as(ctx, EVE, "mine")
    keep_forecasts(ctx)
    assert ctx.queue.foreseen[1]["mine"][1] == "a run of 4001's"


def test_note_for_all_users_names_no_run(ctx: Context) -> None:
    submit_as(ctx, ANN, "theirs")
    (pool,) = ctx.pools.values()
    held = holder_of_pool(ctx, pool, anybody(ctx))
    assert (held.pool, held.why, held.user) == ("", "a run of 4001's", "4001")
    ctx.config = replace(ctx.config, sharing=Sharing("all"))
    held = holder_of_pool(ctx, pool, anybody(ctx))
    assert (held.pool, held.why) == (pool.id, "run theirs")


def test_log_of_another_users_pool_is_none(ctx: Context) -> None:
    run = submit_as(ctx, EVE, "mine")
    pool = ctx.pools[str(run.pool)]
    assert log_of(ctx, run, "pool") != Path(os.devnull)
    pool.setup = replace(pool.setup, owner=ANN)
    assert log_of(ctx, run, "pool") == Path(os.devnull)


def test_a_shared_box_decides_everything_itself() -> None:
    """`Users` allows its one user everything; nothing of that may hold for several."""
    decided = {name for name in vars(Users) if not name.startswith("__")}
    assert decided and decided <= vars(SharedBox).keys()
