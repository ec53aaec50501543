"""Where only owners see what is theirs, another user learns nothing of it by any request of the daemon's API.

`python -m tests.daemon.test_hidden` is the walk itself, in a process in which other users can be.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from lorad.daemon.api.verbs import ROUTES, events
from lorad.daemon.context import Context
from lorad.store import runs
from tests.kit.callers import CallerOf
from tests.kit.daemon_world import hold, until
from tests.kit.passable import make_passable, why_not
from tests.kit.shared_world import OTHER, OWNER, shared, shared_home
from tests.kit.warm.processes import is_warm, keep_warm, python

pytestmark = pytest.mark.system

WORD, NONE = "zq", "nx"  # what all names and words of the owner's begin with, and those that nobody has
SPEC = """{model: {path: /zqmodel}, data: {train: sort}, reward: exact_match, resources: {group: zqgroup},
trainer: {steps: 4}, checkpoint: {every: 2}}"""
OWN = "{trainer: {steps: 4}, checkpoint: {every: 2}}"
MADE = {"source": "a.yaml", "cwd": "/"}
KL = ["algorithm.kl.coef=0.1", "algorithm.kl.reference=zqrun@1004"]
OF_VERSION = ("zqrun@1004", "zqrun@latest", "zqrun@best", "zqrun@step:2", "zqrun", "zqalias", "zqold@1004")
NAMES = {
    "run": ("zqrun", "zqold", "zqnew", "zqworks", "zqsweep-1"),
    "version": OF_VERSION,
    "alias": ("zqalias", "zqlost"),
    "pool": ("zqmodel-1",),
    "group": ("mine",),
    "device": ("cpu",),
}


class Asked(NamedTuple):
    """A request. takes: it would give one of the owner's names to something of its own, which is refused."""

    path: str
    body: Any = None
    takes: bool = False


def of_path(path: str, *bodies: Any) -> list[Asked]:
    """Make requests with each name that a part of the path may have."""
    paths = [path]
    for part, names in NAMES.items():
        paths = (
            [one.replace(f"{{{part}}}", name) for one in paths for name in names] if part in path else paths
        )
    return [Asked(one, body) for one in dict.fromkeys(paths) for body in bodies or (None,)]


MORE: dict[tuple[str, str], list[Asked]] = {
    ("GET", "/v1/logs"): [Asked("/v1/logs?of=daemon"), Asked("/v1/logs?of=gateway")],
    ("GET", "/v1/devices"): [Asked("/v1/devices?history=1")],
    ("POST", "/v1/devices/{device}/reserve"): of_path(
        "/v1/devices/{device}/reserve", {"seconds": 9, "now": True}, {"seconds": 9}
    ),
    ("GET", "/v1/bill"): [
        Asked(f"/v1/bill?by={by}") for by in ("run", "user", "sweep", "alias", "pool", "day")
    ]
    + [Asked(f"/v1/bill?user={OWNER}")],
    ("GET", "/v1/events"): [
        Asked(f"/v1/events?{which}{more}")
        for which in ("after=0", "last=1000")
        for more in ("", "&run=zqrun", "&run=zqold", "&run=zqnew")
    ],
    ("POST", "/v1/runs"): [
        Asked("/v1/runs", MADE | {"spec": OWN, "name": "zqrun"}, takes=True),
        Asked("/v1/runs", MADE | {"spec": OWN, "name": "ZQrun"}, takes=True),
        Asked("/v1/runs", MADE | {"spec": OWN, "name": "zqrun", "replace": True}, takes=True),
        Asked("/v1/runs", MADE | {"spec": OWN, "overrides": KL}),
    ],
    ("POST", "/v1/check"): [
        Asked("/v1/check", MADE | {"spec": OWN}),
        Asked("/v1/check", MADE | {"spec": OWN, "name": "zqrun"}, takes=True),
        Asked("/v1/check", MADE | {"spec": OWN, "name": "zqrun", "replace": True}, takes=True),
        Asked("/v1/check", MADE | {"spec": OWN, "overrides": KL}),
    ],
    ("GET", "/v1/runs"): [Asked("/v1/runs?all=1"), Asked("/v1/runs?names=zqrun,zqold,zqworks")],
    ("POST", "/v1/select"): [
        Asked("/v1/select", {"selection": {"names": ["zqrun"]}}),
        Asked("/v1/select", {"selection": {"tags": ["zqtag"]}}),
        Asked("/v1/select", {"selection": {"owner": str(OWNER)}}),
        Asked("/v1/select", {"selection": {}, "recent": False, "keys": ["model.path"]}),
    ],
    ("POST", "/v1/runs/{run}/resume"): of_path("/v1/runs/{run}/resume", {}, {"step": 2}),
    ("POST", "/v1/runs/{run}/labels"): of_path("/v1/runs/{run}/labels", {"add": ["x"]}),
    ("POST", "/v1/runs/{run}/edit"): of_path("/v1/runs/{run}/edit", {"overrides": ["resources.priority=1"]}),
    ("POST", "/v1/runs/{run}/rename"): [
        *of_path("/v1/runs/{run}/rename", {"name": "other"}),
        *(
            Asked("/v1/runs/zqgone/rename", {"name": name}, takes=True)
            for name in ("zqrun", "ZQRUN", "zqold")
        ),
    ],
    ("POST", "/v1/groups/{group}"): of_path("/v1/groups/{group}", {"limit": 2}),
    ("GET", "/v1/runs/{run}/samples"): of_path("/v1/runs/{run}/samples?step=2"),
    ("GET", "/v1/runs/{run}/logs"): [
        *of_path("/v1/runs/{run}/logs?of=pool"),
        Asked("/v1/runs/zqgone/logs?of=pool"),
    ],
    ("GET", "/v1/versions"): [Asked(f"/v1/versions{more}") for more in ("", "?run=zqrun", "?run=zqgone")],
    ("GET", "/v1/results"): [Asked(f"/v1/results{more}") for more in ("", "?run=zqrun", "?run=zqgone")],
    ("POST", "/v1/versions/{version}/export"): of_path(
        "/v1/versions/{version}/export", {"directory": "/tmp/x"}
    ),
    ("POST", "/v1/versions/{version}/fork"): [
        *of_path("/v1/versions/{version}/fork", {}, {"fresh": True}),
        Asked("/v1/versions/zqgone/fork", {"name": "zqrun"}, takes=True),
    ],
    ("POST", "/v1/versions/{version}/results"): of_path("/v1/versions/{version}/results", {"data": "sort"}),
    ("POST", "/v1/aliases/{alias}"): [
        *(Asked("/v1/aliases/mine", {"version": name}) for name in OF_VERSION),
        Asked("/v1/aliases/zqalias", {"version": "zqgone"}, takes=True),
        *of_path("/v1/aliases/{alias}", {"rollback": True}, {"version": "zqrun@1004"}),
    ],
    ("GET", "/v1/aliases/{alias}/moves"): [
        *of_path("/v1/aliases/{alias}/moves"),
        Asked("/v1/aliases/zqpast/moves"),
    ],
    ("POST", "/v1/serve"): [
        Asked("/v1/serve", {"model": "/zqmodel", "cwd": "/"}),
        *(
            Asked(
                "/v1/serve",
                {"model": "/x", "cwd": "/", "adapters": [{"name": name, "directory": "/x"}]},
                takes=True,
            )
            for name in ("zqrun", "zqalias")
        ),
    ],
    ("POST", "/v1/serve/stop"): [
        Asked("/v1/serve/stop", {"model": name}) for name in ("zqrun", "zqalias", "/zqmodel", "nothing")
    ],
    ("POST", "/v1/serving"): [Asked("/v1/serving", {"model": name}) for name in OF_VERSION],
    ("POST", "/v1/serving/base"): [Asked("/v1/serving/base", MADE | {"spec": OWN})],
    ("POST", "/v1/serving/owner"): [Asked("/v1/serving/owner", {"model": "zqalias"})],
    ("POST", "/v1/tinker/owner"): [Asked("/v1/tinker/owner", {"owner": str(OWNER)})],
    ("POST", "/v1/sweeps"): [
        Asked("/v1/sweeps", MADE | {"spec": OWN, "overrides": ["seed=1,2"], "name": "zqsweep"}, takes=True),
        Asked("/v1/sweeps", MADE | {"spec": OWN, "overrides": ["seed=1,2", *KL], "name": "grid"}),
    ],
    ("GET", "/v1/sweeps"): [Asked("/v1/sweeps"), Asked("/v1/sweeps?sweep=zqsweep")],
    ("POST", "/v1/gc"): [Asked("/v1/gc", {"dry_run": True})],
    ("POST", "/v1/try"): [Asked("/v1/try", MADE | {"spec": OWN, "n": 1})],
    ("POST", "/v1/generate"): [
        Asked("/v1/generate", {"version": name, "prompt": "1"}) for name in OF_VERSION
    ],
}


def walk() -> Iterator[tuple[str, Asked]]:
    """Yield requests to every route: as it is, with names of the owner's in its path, and those of MORE."""
    for method, path, *_ in ROUTES:
        bare = of_path(path, {}) if method == "POST" else of_path(path)
        for asked in [*bare, *MORE.get((method, path), [])]:
            yield method, asked


def test_no_request_tells_of_what_is_hidden() -> None:
    if reason := why_not():
        pytest.skip(reason)
    done = subprocess.run([*python(), "-m", __name__], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


async def tell_tales() -> list[str]:
    """List the answers to another user that say something of the owner's, or differ from those about what is
    not there.
    """
    events.IDLE_SECONDS = 0.1
    wrong: list[str] = []
    with shared_home() as home, ExitStack() as stack:
        async with shared(home, read="owner") as ctx:
            ann, eve = (stack.enter_context(CallerOf(uid, home)) for uid in (OWNER, OTHER))
            await _make_owners(ctx, ann)
            await _make_others(ctx, ann, eve)
            for method, asked in walk():
                wrong += await _tried(eve, method, asked)
            status, _ = await asyncio.to_thread(eve.ask, "GET", "/v1/metrics")
            wrong += [] if status == 403 else ["GET /v1/metrics answers with sums over all users"]
    return wrong


async def _ask(caller: CallerOf, method: str, path: str, body: Any = None) -> Any:
    status, answer = await asyncio.to_thread(caller.ask, method, path, body)
    assert status == 200, (path, answer)
    return answer


async def _run(ctx: Context, caller: CallerOf, name: str, spec: str, state: str = "ended") -> None:
    await _ask(caller, "POST", "/v1/runs", MADE | {"spec": spec, "name": name})
    await until(lambda: runs.get(ctx.store, name).state == state, 60)
    assert runs.get(ctx.store, name).reason in (None, "completed"), runs.get(ctx.store, name)


async def _make_owners(ctx: Context, ann: CallerOf) -> None:
    """Make runs with a tag, a note and results, an alias, a sweep, a pool that serves, and a renamed run."""
    sweep = MADE | {"spec": SPEC, "overrides": ["seed=1,2"], "name": "zqsweep"}
    await _ask(ann, "POST", "/v1/sweeps", sweep)
    for name in ("zqrun", "zqold", "zqgone"):
        await _run(ctx, ann, name, SPEC)
        await _ask(
            ann,
            "POST",
            f"/v1/runs/{name}/labels",
            {"add": [f"zqtag-{name[2:]}"], "note": f"zqnote-{name[2:]}"},
        )
        await _ask(ann, "POST", f"/v1/versions/{name}@1004/results", {"data": f"zqdata-{name[2:]}"})
    await _ask(ann, "POST", "/v1/aliases/zqalias", {"version": "zqrun@1004"})
    for alias in ("zqpast", "zqlost"):
        await _ask(ann, "POST", f"/v1/aliases/{alias}", {"version": "zqgone@1004"})
        await _ask(ann, "DELETE", f"/v1/aliases/{alias}")
    await _ask(ann, "POST", "/v1/runs/zqold/rename", {"name": "zqnew"})
    await _ask(ann, "DELETE", "/v1/runs/zqgone")


async def _make_others(ctx: Context, ann: CallerOf, eve: CallerOf) -> None:
    """Have the other user take names that the owner gave up, and wait behind a run of the owner's, whose pool
    serves as well.
    """
    await _run(ctx, eve, "zqgone", OWN)
    await _ask(eve, "POST", "/v1/aliases/zqpast", {"version": "zqgone"})
    hold(ctx.home.root, "zqworks")
    (ctx.home.root / "held").chmod(0o644)
    await _run(ctx, ann, "zqworks", SPEC, "running")
    runs.set_fields(ctx.store, "zqrun", serving=1)
    await _run(ctx, eve, "mine", OWN, "queued")
    await until(lambda: runs.get(ctx.store, "mine").waiting, 60)


async def _tried(eve: CallerOf, method: str, asked: Asked) -> list[str]:
    """Say what is wrong with the answer to a request, if anything is."""
    line = f"{method} {asked.path} {asked.body or ''}"
    status, answer = await asyncio.to_thread(eve.ask, method, asked.path, asked.body)
    text, names = str(answer), _names_in(f"{asked.path} {asked.body}")
    wrong = [] if status < 500 else [f"{line}: {status} {text}"]
    rest = text
    # the home's name is made of random letters; then what it asked about itself, and what is its own by now
    for name in (str(eve.home), *names, "zqgone", "zqpast"):
        rest = rest.replace(name, "")
    if WORD in rest.lower():
        at = rest.lower().index(WORD)
        wrong.append(f"{line}: {status} …{rest[max(0, at - 60) : at + 60]}…")
    if asked.takes or not names - {"zqgone", "zqpast"}:
        return wrong
    other = Asked(asked.path.replace(WORD, NONE), _missing(asked.body))
    there = await asyncio.to_thread(eve.ask, method, other.path, other.body)
    if (status, text) != (there[0], str(there[1]).replace(NONE, WORD)):
        wrong.append(f"{line}: {status} {text}\n    and of what is not there: {there}")
    return wrong


def _names_in(text: str) -> set[str]:
    words = "".join(one if one.isalnum() or one == "-" else " " for one in text).split()
    return {word for word in words if word.lower().startswith(WORD)}


def _missing(body: Any) -> Any:
    match body:
        case str():
            return body.replace(WORD, NONE)
        case dict():
            return {key: _missing(value) for key, value in body.items()}
        case list():
            return [_missing(value) for value in body]
    return body


def main() -> int:
    make_passable()
    if is_warm():
        keep_warm()
    wrong = asyncio.run(tell_tales())
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
