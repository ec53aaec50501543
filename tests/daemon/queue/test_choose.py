"""Who is placed where, and what others wait for: one table of the cases, without any process."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from lorad.box.config import Backend, Limit, Queue
from lorad.daemon.context import Context
from lorad.daemon.gpu.state import Neighbour, SetAside
from lorad.daemon.process.processes import ProcessState
from lorad.daemon.queue.choose import Blocked, WaitingRun, choose, choose_devices, fitted
from lorad.daemon.queue.place import place_runs
from lorad.daemon.queue.setups import Placement, candidates
from lorad.daemon.queue.snapshot import Snapshot, _Taken, take_snapshot
from lorad.errors import SpecError
from lorad.protocol.listener import user_name
from lorad.protocol.nodes import GrantStatus
from lorad.protocol.preflight import SpecFacts
from lorad.states import EndReason, Move
from lorad.store import runs
from tests.kit.daemon_world import open_context, submit
from tests.kit.fakes.fake_cluster import cluster
from tests.kit.fakes.gpu_kit import gpus

Spec = Mapping[str, Any]  # sections of a spec, and `base`: `one` unless it is given
PLAIN: Spec = {}
TWO: Spec = {"base": "two"}
WIDE: Spec = {"base": "two", "trainer": {"backend": "fsdp", "steps": 6, "dp": 2}}
LARGE: Spec = {"rollout": {"max_staleness": 14}}  # three of them fill a pool
ALONE: Spec = {"resources": {"exclusive": True}}
HIGH: Spec = {"resources": {"priority": 5}}
FIRM: Spec = {"resources": {"preemptible": False}}
YIELDS: Spec = {"resources": {"yield_to": "foreign"}}
BUSY = "pool one-1 is busy with run w1; starts when it ends"
FULL = "pool one-1 has room for 13 more versions, it needs 17; 3 runs are in it"


@dataclass(frozen=True)
class Case:
    """What is asked for in a state of the queue, and what becomes of it.

    gets: `POOL on DEVICES`, where a pool that is not there yet is called `new`; else what it waits for.
    by: who keeps it from having a pool, each a value of `Hindrance`.
    stops: runs that have to stop for it.
    gpus: how many there are; 0 for a CPU alone.
    nodes: how many nodes a cluster has beside it.
    works: runs w1, w2, ... that have their places.
    idle: bases of pools that are up without a run, beside those of the runs.
    pools: fields of pools that are not as usual.
    queued: runs q1, q2, ... that were queued before.
    serves: a request asks for a pool to serve, not a run.
    beside: fields of the snapshot that say who else has devices.
    """

    name: str
    asks: Spec
    gets: str
    by: str = "pools"
    stops: Sequence[str] = ()
    gpus: int = 0
    nodes: int = 0
    works: Sequence[Spec] = ()
    idle: Sequence[str] = ()
    pools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    queued: Sequence[Spec] = ()
    serves: bool = False
    queue: Queue = field(default_factory=Queue)
    beside: Mapping[str, Any] = field(default_factory=dict)


def over(nodes: int, base: str = "one", **resources: Any) -> Spec:
    """Ask for so many nodes with 8 GPUs each."""
    return {
        "base": base,
        "resources": {"nodes": nodes, "devices": 8 * nodes, "where": "cluster"} | resources,
        "trainer": {"backend": "fsdp", "dp": 8 * nodes, "steps": 6},
        "rollout": {"backend": "sglang", "servers": nodes, "tp": 8},
    }


def aside(*, reserved: bool) -> Mapping[str, Any]:
    return {"set_aside": {"cuda:0": SetAside("ann's", "cuda:0 is ann's", urgent=False, reserved=reserved)}}


def neighbour(left: float | None = None) -> Mapping[str, Any]:
    return {"neighbours": {"cuda:0": Neighbour("python of eve", 0.0, left)}}


def other_daemon(*, is_idle: bool) -> Mapping[str, Any]:
    return {"taken": {"cuda:0": _Taken("cuda:0 held by pool theirs-1", is_idle)}}


def most(**limit: Any) -> Queue:
    return Queue(limits=Limit(**limit))


OCCUPIED = {"occupied": {"cuda:0": ("cuda:0 is in use by python", False)}}
STOPPING = {"one-1": {"stop_asked": 1.0}}
GRANTED = {"one-1": {"grant": GrantStatus(state="granted")}}
NEVER = (
    "it can never run: an empty pool of its kind takes adapters up to rank 512, this one has 1000; "
    "lower lora.rank"
)

# fmt: off
CASES = [
    # free devices, and pools of the base
    Case("nothing is in the way", PLAIN, "new on cpu"),
    Case("its pool has room", PLAIN, "one-1 on cpu", works=[PLAIN]),
    Case("its pool is idle", PLAIN, "one-1 on cpu", idle=["one"]),
    Case("all ranks share a CPU", WIDE, "new on cpu"),
    Case("the second GPU is free", TWO, "new on cuda:1", gpus=2, works=[PLAIN]),
    Case("a warm pool goes first", TWO, "two-1 on cuda:1", gpus=3, idle=["one", "two"]),
    Case("neighbouring GPUs are free", WIDE, "new on cuda:1, cuda:2", gpus=3, works=[PLAIN]),
    Case("the gap is too narrow", WIDE, f"1 of 2 devices free; {BUSY}", gpus=2, works=[PLAIN]),
    Case("it needs more than there is", WIDE, "it needs 2 GPUs, this machine has 1", by="", gpus=1),
    # pools of other bases
    Case("another base is busy", TWO, BUSY, works=[PLAIN]),
    Case("two runs are busy", TWO, "pool one-1 is busy with runs w1 and w2; starts when they end",
         works=[PLAIN, PLAIN]),
    Case("an idle pool is there", TWO, "waiting for idle pool one-1 on cpu to end", idle=["one"]),
    Case("a pool is stopping", TWO, "pool one-1 on cpu is stopping", idle=["one"], pools=STOPPING),
    Case("its own pool is stopping", PLAIN, "pool one-1 on cpu is stopping", idle=["one"], pools=STOPPING),
    Case("a pool serves", TWO, "pool one-1 on cpu serves s; `lorad serve --stop` lets it end",
         idle=["one"], pools={"one-1": {"serves": {"s"}}}),
    Case("a pool answers", TWO, "pool one-1 on cpu answers a request", idle=["one"],
         pools={"one-1": {"guests": 1}}),
    # room in its pool
    Case("there are too many versions", LARGE, FULL, works=[LARGE] * 3),
    Case("a small one still fits", PLAIN, "one-1 on cpu", works=[LARGE] * 3),
    Case("it wants to be alone", ALONE, works=[PLAIN], gets=(
         "it is to have pool one-1 for itself (resources.exclusive); run w1 is in it")),
    Case("another is alone", PLAIN, "run w1 has pool one-1 for itself; starts when it ends", works=[ALONE]),
    Case("its rank is too high", {"lora": {"rank": 1000}}, NEVER, by="never"),
    # runs before it in the queue
    Case("one waits to be alone", PLAIN, "run q1 is next on cpu, when the others end", by="queue",
         works=[PLAIN], queued=[ALONE]),
    Case("one waits with another base", PLAIN, "run q1 is next on cpu, when the others end", by="queue",
         works=[PLAIN], queued=[TWO]),
    Case("an urgent one waits for room", PLAIN, "run q1 is next on cpu, when it fits", by="queue",
         works=[{**LARGE, **FIRM}] * 3, queued=[{**LARGE, **HIGH}]),
    Case("an equal one waits for room", PLAIN, "one-1 on cpu", works=[LARGE] * 3, queued=[LARGE]),
    Case("it passes where it is urgent", HIGH, "one-1 on cpu", works=[PLAIN], queued=[ALONE]),
    Case("one without enough devices claims nothing", PLAIN, "one-1 on cuda:0", gpus=1, works=[PLAIN],
         queued=[WIDE]),
    # limits of its user
    Case("it has enough runs", TWO, "me has 1 of 1 runs working", by="limit", gpus=2, works=[PLAIN],
         queue=most(runs=1)),
    Case("it has enough devices", TWO, f"1 of 2 devices free; {BUSY}; me has 1 of 1 device",
         by="devices pools", gpus=2,
         works=[PLAIN], queue=most(devices=1)),
    Case("it asks for too many devices", WIDE, "2 of 2 devices free; me has 0 of 1 device, it needs 2",
         by="devices",
         gpus=2, queue=most(devices=1)),
    Case("a pool that it has takes it", PLAIN, "one-1 on cuda:0", gpus=2, works=[PLAIN],
         queue=most(devices=1)),
    Case("its idle pool is too much", TWO, by="devices pools", gpus=2, idle=["one"], queue=most(devices=1),
         gets=(
         "1 of 2 devices free; waiting for idle pool one-1 on cuda:0 to end; me has 1 of 1 device")),
    # other users, daemons and programs
    Case("a device is reserved", PLAIN, "cuda:0 is ann's", by="aside", gpus=1, beside=aside(reserved=True)),
    Case("a reserved device is left out", PLAIN, "new on cuda:1", gpus=2, beside=aside(reserved=True)),
    Case("a quiet device is not for runs", PLAIN, "cuda:0 is ann's", by="aside", gpus=1,
         beside=aside(reserved=False)),
    Case("another daemon has it", PLAIN, "cuda:0 held by pool theirs-1", by="others", gpus=1,
         beside=other_daemon(is_idle=True)),
    Case("another daemon has a part", WIDE, "1 of 2 devices free; cuda:0 held by pool theirs-1", by="others",
         gpus=2,
         beside=other_daemon(is_idle=False)),
    Case("a program computes there", PLAIN, "cuda:0 is in use by python", by="others", gpus=1,
         beside=OCCUPIED),
    Case("a program is passed by", PLAIN, "new on cuda:1", gpus=2, beside=OCCUPIED),
    Case("it yields to a program", YIELDS, by="neighbour", gpus=1, beside=neighbour(), gets=(
         "cuda:0 is in use by python of eve, to whom it yields (resources.yield_to)")),
    Case("the program left just now", YIELDS, by="neighbour", gpus=1, beside=neighbour(1.0), gets=(
         "python of eve left cuda:0; it starts when nobody else was there for 60 s")),
    Case("others yield to no program", PLAIN, "new on cuda:0", gpus=1, beside=neighbour()),
    # runs that make room
    Case("it preempts another base", {**TWO, **HIGH}, BUSY, stops=["w1"], works=[PLAIN]),
    Case("it preempts to be alone", {"resources": {"priority": 5, "exclusive": True}}, stops=["w1", "w2"],
         works=[PLAIN, PLAIN], gets=(
         "it is to have pool one-1 for itself (resources.exclusive); runs w1 and w2 are in it")),
    Case("the youngest makes room", {**LARGE, **HIGH}, FULL, stops=["w3"], works=[LARGE] * 3),
    Case("a firm run stays", {**TWO, **HIGH}, BUSY, works=[FIRM]),
    Case("an equal run stays", {**TWO, **HIGH}, BUSY, works=[HIGH]),
    Case("nobody stops without preemption", {**TWO, **HIGH}, BUSY, works=[PLAIN],
         queue=Queue(preemption=False)),
    Case("nobody stops beside a program", {**WIDE, **HIGH}, gpus=2, works=[PLAIN],
         beside={"occupied": {"cuda:1": ("cuda:1 is in use by python", False)}}, gets=(
         f"0 of 2 devices free; {BUSY}")),
    Case("the cheapest device is cleared", {"base": "three", **HIGH}, gpus=2, stops=["w2"], gets=(
         f"0 of 2 devices free; {BUSY}; pool two-1 is busy with run w2; starts when it ends"),
         works=[{"resources": {"priority": 2}}, TWO]),
    # requests to serve
    Case("a request gets a free device", PLAIN, "new on cpu", serves=True),
    Case("a request joins any pool", PLAIN, "one-1 on cpu", serves=True, works=[ALONE]),
    Case("a request passes the queue", PLAIN, "new on cuda:1", serves=True, gpus=2, works=[TWO],
         queued=[{"base": "three", **ALONE}]),
    Case("a request is refused", TWO, "pool one-1 is busy with run w1", serves=True, works=[PLAIN]),
    Case("a request stops nobody", {**TWO, **HIGH}, "pool one-1 is busy with run w1", serves=True,
         works=[PLAIN]),
    Case("a request clears an idle pool", TWO, "waiting for idle pool one-1 on cpu to end", serves=True,
         idle=["one"]),
    Case("a request may have quiet devices", PLAIN, "new on cuda:0", serves=True, gpus=1,
         beside=aside(reserved=False)),
    Case("a request has no reserved device", PLAIN, "cuda:0 is ann's", by="aside", serves=True, gpus=1,
         beside=aside(reserved=True)),
    Case("a request heeds its limit", TWO, by="devices pools", serves=True, gpus=2, works=[PLAIN],
         queue=most(devices=1), gets=(
         f"1 of 2 devices free; pool one-1 is busy with run w1; {user_name(os.getuid())} has 1 of 1 device")),
    # a cluster
    Case("the cluster is asked", over(2), "new on 2 x 8 GPUs", nodes=3),
    Case("one has asked already", over(2, "two"), nodes=3, works=[over(2)], gets=(
         "run w1 is before it: waits for 2 x 8 GPUs of the cluster")),
    Case("the first was granted", over(2, "two"), "new on 2 x 8 GPUs", nodes=3, works=[over(2)],
         pools=GRANTED),
    Case("its base has nodes", over(2), "one-1 on 2 x 8 GPUs", nodes=3, works=[over(2)], pools=GRANTED),
    Case("another passes it in the cluster", over(2, "two"), by="queue", nodes=3, queued=[over(1, "three")],
         beside={"passed": frozenset({"r"})}, gets=(
         "2 x 8 GPUs were not granted in time; run q1 is tried before it")),
    Case("an urgent one has asked", over(1), "run w2 is before it: waits for 2 x 8 GPUs of the cluster",
         nodes=3, works=[over(1), over(2, "two", priority=3)], pools=GRANTED),
]
# fmt: on


def ask(ctx: Context, name: str, spec: Spec) -> None:
    sections = {key: value for key, value in spec.items() if key != "base"}
    base = f"/models/{spec.get('base', 'one')}"
    submit(ctx, name, base, facts=SpecFacts(max_positions=2048), **sections)


def played(case: Case, ctx: Context) -> Snapshot:
    """Bring about the state of a case, and look at it."""
    at_work = {f"w{number}": spec for number, spec in enumerate(case.works, 1)}
    over_soon = {f"i{number}": {"base": base} for number, base in enumerate(case.idle, 1)}
    for name, spec in (at_work | over_soon).items():
        ask(ctx, name, spec)
        place_runs(ctx)
        assert runs.get(ctx.store, name).pool, "it has no place"
        for pool in ctx.pools.values():
            pool.grant = GrantStatus(state="granted")
    for name in over_soon:
        runs.move(ctx.store, name, Move.END, reason=EndReason.STOPPED)
    ctx.config = structs.replace(ctx.config, queue=case.queue)
    for number, spec in enumerate(case.queued, 1):
        ask(ctx, f"q{number}", spec)
    ask(ctx, "r", case.asks)
    now = take_snapshot(ctx, runs.queue(ctx.store))
    for pool in ctx.pools.values():
        pool.process, pool.grant = ProcessState("alive", 1), None
        for key, value in case.pools.get(pool.id, {}).items():
            setattr(pool, key, value)
    return dataclasses.replace(now.with_runs(now.active, now.pools), **case.beside)


def decided(case: Case, ctx: Context, now: Snapshot) -> Placement | Blocked:
    """Choose for what a case asks, after the runs that were queued before it."""
    claims: list[WaitingRun] = []
    for run in now.queued:
        if case.serves and run.name == "r":
            return choose_devices(now, [fitted(now, run, place) for place in candidates(ctx, run)])
        try:
            choice = choose(ctx, now, run, claims)
        except SpecError as error:
            choice = Blocked(error.message, frozenset())
        if run.name == "r":
            return choice
        claims += choice.claims if isinstance(choice, Blocked) else ()
    raise AssertionError("it is not in the queue")


def in_words(now: Snapshot, choice: Placement | Blocked) -> str:
    if isinstance(choice, Blocked):
        return choice.why
    key = choice.setup.key
    pool = next((pool.id for pool in now.pools if pool.setup.key == key and now.is_used(pool)), "new")
    return f"{pool} on {', '.join(device.name for device in choice.devices)}"


def done(ctx: Context) -> str:
    """Say what a pass of placing did with the run, in the words of a case."""
    before = {*ctx.pools}
    place_runs(ctx)
    run = runs.get(ctx.store, "r")
    if run.pool is None:
        return run.waiting or run.detail
    pool = ctx.pools[run.pool]
    return f"{pool.id if pool.id in before else 'new'} on {pool.where}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case_is_decided_as_told(
    case: Case, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"cluster": cluster(home, case.nodes)} if case.nodes else {}
    ctx = open_context(home, backends={"sglang": Backend(python=Path("/sglang"))}, **options)
    if case.gpus:
        gpus(ctx, case.gpus, monkeypatch, tmp_path)
    now = played(case, ctx)
    choice = decided(case, ctx, now)
    assert in_words(now, choice) == case.gets
    if isinstance(choice, Blocked):
        assert choice.by == {*case.by.split()}
        assert [victim.name for victim in choice.victims] == [*case.stops]
    if not (case.serves or case.idle or case.pools or case.beside):
        assert done(ctx) == case.gets
