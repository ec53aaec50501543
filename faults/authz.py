"""`make authz`: send every request of the daemon's API by its owner, by another user, by another user where
only owners see what is theirs, by an admin and by root, each a process of that user, and compare with what is
written down here.

The status is compared, and for lists whether they show what is the owner's (+ or -). Users who may do
something get what the request comes to (409: the run has ended already), all others 403, or 404 where they
may not even see it.
"""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lorad.daemon.api.verbs import ROUTES, events
from lorad.daemon.context import Context
from lorad.store import pools, runs
from lorad.store.rows import ReservationRow
from tests.kit.callers import CallerOf
from tests.kit.passable import make_passable, why_not
from tests.kit.shared_world import ADMIN, OTHER, OWNER, ROOT, shared, shared_home
from tests.kit.warm.processes import is_warm, keep_warm

COLUMNS = ("owner", "other", "hidden", "admin", "root")
UIDS = {"owner": OWNER, "other": OTHER, "hidden": OTHER, "admin": ADMIN, "root": ROOT}
RUN, ALIAS, SWEEP = "mine", "front", "grid"
THEIRS = "theirs"  # a run of the other user's
SPEC = "{trainer: {steps: 4}, checkpoint: {every: 2}}"
FIRST = {"overrides": ["resources.priority=1"]}  # which an admin's runs may have
REFUSED = {"spec": SPEC, "source": "a.yaml", "cwd": "/", "overrides": ["lora.rank=13"]}  # by the preflight

RESERVED = ReservationRow(device="cpu", owner="owner", owner_uid=OWNER, why="", made_at=0.0)

Route = tuple[str, str]


class Case(NamedTuple):
    """`{me}` in path and body: the caller's column. expected: one for each of COLUMNS."""

    path: str
    expected: str
    body: Any = None


Found = tuple[Case, str, list[str]]  # of a method: what came of it for each of COLUMNS

EVERYBODY = "200 200 200 200 200"
READERS = "200 200 404 200 200"
READ_LIST = "200+ 200+ 200- 200+ 200+"
OWNERS = "200 403 404 200 200"
OWNERS_LATE = "409 403 404 409 409"  # it has ended
TAKERS = "409 403 409 409 409"  # of a name: it is in use, also where it is hidden
ADMINS = "403 403 403 200 200"

EXPECTED: dict[Route, list[Case]] = {
    ("GET", "/v1/status"): [Case("/v1/status", EVERYBODY)],
    ("GET", "/v1/metrics"): [Case("/v1/metrics", "200 200 403 200 200")],
    ("GET", "/v1/database"): [Case("/v1/database", ADMINS)],
    ("GET", "/v1/orphans"): [Case("/v1/orphans", ADMINS)],
    ("GET", "/v1/logs"): [
        Case("/v1/logs?of=daemon", ADMINS),
        Case("/v1/logs?of=gateway", EVERYBODY),
        Case("/v1/logs?of=driver", "422 422 422 422 422"),
    ],
    ("GET", "/v1/pools"): [Case("/v1/pools", READ_LIST)],
    ("DELETE", "/v1/pools/{pool}"): [
        Case("/v1/pools/tiny-1", OWNERS_LATE),
        Case(f"/v1/pools/tiny-1?run={THEIRS}", OWNERS_LATE),
        Case("/v1/pools/tiny-1?force=1", OWNERS_LATE),  # it serves
        Case("/v1/pools/none", "404 404 404 404 404"),
    ],
    ("GET", "/v1/devices"): [Case("/v1/devices", EVERYBODY)],
    ("GET", "/v1/nodes"): [Case("/v1/nodes", EVERYBODY)],
    ("POST", "/v1/devices/{device}/reserve"): [
        Case("/v1/devices/cpu/reserve", "200 409 409 409 409", {"seconds": 60}),  # the owner has it
        Case("/v1/devices/none/reserve", "404 404 404 404 404", {}),
        Case("/v1/devices/cpu/reserve", "403 409 409 409 409", {"seconds": 1e9}),  # more than a day
    ],
    ("DELETE", "/v1/devices/{device}/reservation"): [
        Case("/v1/devices/none/reservation", "404 404 404 404 404"),
        Case("/v1/devices/cpu/reservation", "200 403 403 200 200"),
    ],
    ("GET", "/v1/bill"): [
        Case("/v1/bill?by=user", EVERYBODY),
        Case("/v1/bill?by=colour", "422 422 422 422 422"),
    ],
    ("GET", "/v1/events"): [
        Case("/v1/events?after=0", READ_LIST),
        Case(f"/v1/events?run={RUN}", READERS),
    ],
    ("POST", "/v1/runs"): [Case("/v1/runs", "422 422 422 422 422", REFUSED)],
    ("POST", "/v1/check"): [
        Case("/v1/check", "422 422 422 422 422", REFUSED),
        Case("/v1/check", EVERYBODY, REFUSED | {"overrides": []}),
        Case("/v1/check", TAKERS, REFUSED | {"name": RUN, "replace": True}),
    ],
    ("PUT", "/v1/bundles/{bundle}"): [
        Case(f"/v1/bundles/{'0' * 64}", EVERYBODY, {"size": 1}),  # each has a directory of their own
        Case("/v1/bundles/none", "422 422 422 422 422", {"size": 1}),
    ],
    ("GET", "/v1/runs"): [Case("/v1/runs?all=1", READ_LIST)],
    ("POST", "/v1/select"): [Case("/v1/select", READ_LIST, {"selection": {"names": [RUN]}})],
    ("GET", "/v1/runs/{run}"): [
        Case(f"/v1/runs/{RUN}", READERS),
        Case("/v1/runs/none", "404 404 404 404 404"),
    ],
    ("DELETE", "/v1/runs/{run}"): [Case(f"/v1/runs/{RUN}", OWNERS_LATE)],
    ("POST", "/v1/runs/{run}/resume"): [Case(f"/v1/runs/{RUN}/resume", OWNERS_LATE, {})],
    ("POST", "/v1/runs/{run}/pause"): [Case(f"/v1/runs/{RUN}/pause", OWNERS_LATE, {})],
    ("POST", "/v1/runs/{run}/stop"): [Case(f"/v1/runs/{RUN}/stop", OWNERS_LATE, {})],
    ("POST", "/v1/runs/{run}/kill"): [Case(f"/v1/runs/{RUN}/kill", OWNERS_LATE, {})],
    ("POST", "/v1/runs/{run}/rename"): [Case(f"/v1/runs/{RUN}/rename", OWNERS_LATE, {"name": RUN})],
    ("POST", "/v1/runs/{run}/labels"): [Case(f"/v1/runs/{RUN}/labels", OWNERS, {"add": ["good"]})],
    ("POST", "/v1/runs/{run}/edit"): [
        Case(f"/v1/runs/{RUN}/edit", OWNERS_LATE, {"overrides": ["resources.priority=1"]})
    ],
    ("GET", "/v1/groups"): [Case("/v1/groups", EVERYBODY)],
    ("POST", "/v1/groups/{group}"): [Case("/v1/groups/of-{me}", EVERYBODY, {"limit": 2})],
    ("GET", "/v1/runs/{run}/steps"): [Case(f"/v1/runs/{RUN}/steps", READERS)],
    ("GET", "/v1/runs/{run}/evals"): [Case(f"/v1/runs/{RUN}/evals", READERS)],
    ("GET", "/v1/runs/{run}/samples"): [Case(f"/v1/runs/{RUN}/samples", READERS)],
    ("GET", "/v1/runs/{run}/logs"): [
        Case(f"/v1/runs/{RUN}/logs", READERS),
        Case(f"/v1/runs/{RUN}/logs?of=pool", READERS),
    ],
    ("GET", "/v1/runs/{run}/logs/names"): [Case(f"/v1/runs/{RUN}/logs/names", READERS)],
    ("GET", "/v1/runs/{run}/checkpoints"): [Case(f"/v1/runs/{RUN}/checkpoints", READERS)],
    ("GET", "/v1/versions"): [
        Case("/v1/versions", READ_LIST),
        Case(f"/v1/versions?run={RUN}", READERS),
    ],
    ("GET", "/v1/versions/{version}/archive"): [Case(f"/v1/versions/{RUN}@1004/archive", READERS)],
    ("POST", "/v1/versions/{version}/export"): [
        Case(f"/v1/versions/{RUN}@1004/export", READERS, {"directory": "{home}/{me}/new"}),
        Case(f"/v1/versions/{ALIAS}/export", "200 507 404 507 200", {"directory": "{home}/owner/{me}"}),
    ],
    ("POST", "/v1/versions/{version}/pin"): [
        Case(f"/v1/versions/{RUN}@1004/pin", OWNERS, {}),
        Case(f"/v1/versions/{RUN}@1004/pin?run={THEIRS}", OWNERS, {}),  # the path says what it is about
    ],
    ("POST", "/v1/versions/{version}/results"): [
        Case(f"/v1/versions/{RUN}@1004/results", OWNERS, {"data": "sort", "metrics": {"score": 0.5}})
    ],
    ("GET", "/v1/results"): [Case("/v1/results", READ_LIST), Case(f"/v1/results?run={RUN}", READERS)],
    ("POST", "/v1/versions/{version}/unpin"): [Case(f"/v1/versions/{RUN}@1002/unpin", OWNERS, {})],
    ("DELETE", "/v1/versions/{version}"): [Case(f"/v1/versions/{RUN}@1004", OWNERS_LATE)],
    ("POST", "/v1/versions/{version}/fork"): [
        Case(f"/v1/versions/{RUN}@1004/fork", "422 422 404 422 422", {"overrides": ["lora.rank=3"]})
    ],
    ("GET", "/v1/aliases"): [Case("/v1/aliases", READ_LIST)],
    ("POST", "/v1/aliases/{alias}"): [
        Case(f"/v1/aliases/{ALIAS}", OWNERS, {"version": f"{RUN}@1004"}),
        Case("/v1/aliases/of-{me}", READERS, {"version": f"{RUN}@1004"}),
    ],
    ("DELETE", "/v1/aliases/{alias}"): [
        Case("/v1/aliases/of-other", "200 404 404 404 404"),  # it serves a version of the owner's
        Case(f"/v1/aliases/{ALIAS}-{{me}}", OWNERS),
    ],
    ("GET", "/v1/aliases/{alias}/moves"): [Case(f"/v1/aliases/{ALIAS}/moves", READERS)],
    ("POST", "/v1/runs/{run}/verify"): [Case(f"/v1/runs/{RUN}/verify", READERS, {})],
    ("POST", "/v1/gc"): [Case("/v1/gc", "200+ 200- 200- 200+ 200+", {"dry_run": True})],
    ("POST", "/v1/serve"): [
        Case("/v1/serve", "200+ 422 422 200+ 200+", {"model": "builtin:tiny", "cwd": "/"}),
        Case("/v1/serve", "403 403 403 200+ 200+", {"model": "builtin:tiny", "cwd": "/"} | FIRST),
        Case(
            "/v1/serve",
            TAKERS,
            {"model": "builtin:tiny", "cwd": "/", "adapters": [{"name": RUN, "directory": "/x"}]},
        ),
    ],
    ("POST", "/v1/serve/stop"): [Case("/v1/serve/stop", OWNERS, {"model": RUN})],
    ("POST", "/v1/serving"): [Case("/v1/serving", READERS, {"model": ALIAS})],
    ("POST", "/v1/serving/base"): [Case("/v1/serving/base", "422 422 422 422 422", REFUSED)],
    ("POST", "/v1/serving/owner"): [Case("/v1/serving/owner", ADMINS, {"model": ALIAS})],
    ("POST", "/v1/tinker/owner"): [Case("/v1/tinker/owner", ADMINS, {"owner": "0"})],
    ("POST", "/v1/sweeps"): [
        Case("/v1/sweeps", "422 422 422 422 422", REFUSED | {"overrides": ["seed=1"]})  # nothing to sweep
    ],
    ("GET", "/v1/sweeps"): [
        Case("/v1/sweeps", READ_LIST),
        Case(f"/v1/sweeps?sweep={SWEEP}", READERS),
    ],
    ("POST", "/v1/generate"): [
        Case("/v1/generate", "422 422 404 422 422", {"version": ALIAS, "prompt": ""})  # an empty prompt
    ],
    ("POST", "/v1/try"): [
        Case("/v1/try", "422 422 422 422 422", {}),
        Case("/v1/try", "403 403 403 200 200", REFUSED | FIRST),
    ],
    ("POST", "/v1/shutdown"): [Case("/v1/shutdown", ADMINS, {})],
}


def unlisted() -> list[Route]:
    """Requests that nobody has written down who may make, and entries for none."""
    there = {(method, path) for method, path, *_ in ROUTES}
    return sorted(there ^ EXPECTED.keys())


async def matrix(home: Path) -> list[Found]:
    """All requests, one after another."""
    events.IDLE_SECONDS = 0.1
    found: list[Found] = []
    async with shared(home) as ctx:
        with ExitStack() as stack:
            callers = {uid: stack.enter_context(CallerOf(uid, home)) for uid in {*UIDS.values()}}
            await make_subjects(ctx, callers[OWNER], callers[OTHER])
            for route, cases in EXPECTED.items():
                for case in cases:
                    row = [await tried(ctx, callers, route, case, column) for column in COLUMNS]
                    found.append((case, route[0], row))
    return found


async def tried(ctx: Context, callers: dict[int, CallerOf], route: Route, case: Case, column: str) -> str:
    """What a request comes to, in the notation of EXPECTED."""
    read = "owner" if column == "hidden" else "all"
    ctx.config = msgspec.structs.replace(
        ctx.config, sharing=msgspec.structs.replace(ctx.config.sharing, read=read)
    )
    runs.set_fields(ctx.store, RUN, serving=1)  # some request may have ended it
    for pool in ctx.pools.values():
        pool.serves.add(RUN)
    if "{device}" in route[1]:
        pools.reserve(ctx.store, RESERVED, "cpu")
    elif pools.reservations(ctx.store):  # else the pool ends before the requests that need it
        pools.release(ctx.store, "cpu", "cpu", by="owner")
    path = case.path.replace("{me}", column)
    body = filled(case.body, {"{me}": column, "{home}": str(ctx.home.root / "homes")})
    status, answer = await asyncio.to_thread(callers[UIDS[column]].ask, route[0], path, body)
    expected = case.expected.split()[COLUMNS.index(column)]
    mark = (
        ("+" if RUN in str(answer) or SWEEP in str(answer) else "-")
        if expected[-1] in "+-" and status == 200
        else ""
    )
    return f"{status}{mark}"


def filled(value: Any, words: dict[str, str]) -> Any:
    match value:
        case str():
            for key, word in words.items():
                value = value.replace(key, word)
        case dict():
            return {key: filled(inner, words) for key, inner in value.items()}
        case list():
            return [filled(inner, words) for inner in value]
    return value


async def make_subjects(ctx: Context, owner: CallerOf, other: CallerOf) -> None:
    """A run that has ended, an alias and a sweep of the owner's, a run of the other's; a home for each
    caller.
    """
    for column, uid in UIDS.items():
        directory = ctx.home.root / "homes" / column
        directory.mkdir(parents=True)
        os.chown(directory, uid, 65534)
    (ctx.home.root / "homes").chmod(0o711)
    ask = asker(owner)
    sweep = {"spec": SPEC, "source": "a.yaml", "cwd": "/", "overrides": ["seed=1,2"], "name": SWEEP}
    await ask("POST", "/v1/sweeps", sweep)
    await ask("POST", "/v1/runs", {"spec": SPEC, "source": "a.yaml", "cwd": "/", "name": RUN})
    await asker(other)("POST", "/v1/runs", {"spec": SPEC, "source": "a.yaml", "cwd": "/", "name": THEIRS})
    for name in (RUN, f"{SWEEP}-1", f"{SWEEP}-2", THEIRS):
        await ended(ctx, name)
    for alias in (ALIAS, *(f"{ALIAS}-{column}" for column in COLUMNS)):
        await ask("POST", f"/v1/aliases/{alias}", {"version": f"{RUN}@1004"})
    leftover = runs.get(ctx.store, RUN).dir.versions / ".tmp-left"
    leftover.mkdir()
    os.utime(leftover, (time.time() - 3600,) * 2)


def asker(caller: CallerOf) -> Callable[..., Awaitable[Any]]:
    async def ask(*request: Any) -> Any:
        status, answer = await asyncio.to_thread(caller.ask, *request)
        assert status == 200, answer
        return answer

    return ask


async def ended(ctx: Context, name: str) -> None:
    deadline = time.monotonic() + 60
    while (run := runs.get(ctx.store, name)).state != "ended":
        assert time.monotonic() < deadline, run
        await asyncio.sleep(0.05)
    assert run.reason == "completed", run


def told(found: list[Found]) -> int:
    """Print the matrix; how many of its fields are not as expected."""
    print(f"{'':58}" + "".join(f"{column:>9}" for column in COLUMNS))
    wrong = 0
    for case, method, row in found:
        pairs = list(zip(case.expected.split(), row, strict=True))
        wrong += sum(expected != got for expected, got in pairs)
        fields = (got if got == expected else f"{got}!={expected}" for expected, got in pairs)
        print(f"{method:7}{case.path:51}" + "".join(f"{field:>9}" for field in fields))
    users = len({*UIDS.values()})
    print(
        f"{len(found) * len(COLUMNS)} requests of {users} users to {len(EXPECTED)} routes, {wrong} not as "
        "expected"
    )
    return wrong


def main() -> int:
    if reason := why_not():
        print(f"not tried: {reason}")
        return 0
    make_passable()
    if is_warm():
        keep_warm()
    if missing := unlisted():
        print(f"nobody has written down who may do this, or there is no such request: {missing}")
        return 1
    with shared_home() as home:
        return 1 if told(asyncio.run(matrix(home))) else 0


if __name__ == "__main__":
    sys.exit(main())
