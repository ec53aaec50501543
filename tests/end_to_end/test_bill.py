"""The bill of five runs in one pool, after pool, driver and daemon were killed: it adds up to what the pool
used, to 1 %, and its tokens are those of the journals.
"""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from lorad.box.paths import AttemptDir
from lorad.daemon.record.repair import repair
from lorad.protocol.journal import lineage, read
from lorad.records.bill import Bill, BillLine
from lorad.records.requests import Sampling
from tests.kit.world import SMALL, World, world

pytestmark = pytest.mark.system

RUNS = [f"run-{number}" for number in range(5)]
SPEC = SMALL.replace("steps: 6", "steps: 4") + "resources: {restart: on-failure}\n"
# those that are killed, before they can end, and stopped later: the first one has no checkpoint when it is
LONGER = {RUNS[0]: ["trainer.steps=6000", "checkpoint.every=6000"], RUNS[1]: ["trainer.steps=6000"]}
PRICES = "prices: {cpu_hour: 3600, currency: CHF}\n"


@pytest.fixture(scope="module")
def billed() -> Iterator[World]:
    """Five runs that have ended, in a pool that is in its second life."""
    with world() as made:
        made.home.root.mkdir(parents=True, mode=0o700)
        made.home.config.write_text(PRICES)
        made.lorad("daemon", "start")
        for name in RUNS:
            made.client.run(SPEC, source="", cwd=str(made.root), overrides=LONGER.get(name, []), name=name)
        for name in RUNS:
            made.reached(name, 1)
        pool = made.pid(RUNS[0], "pool")
        made.reached(RUNS[0], 2)
        os.kill(pool, signal.SIGKILL)
        made.reached(RUNS[1], 3)
        made.until(partial(_kill_driver, made, RUNS[1]), f"the driver of {RUNS[1]} is killed")
        os.kill(made.client.status().pid, signal.SIGKILL)
        made.lorad("daemon", "start")
        for name in LONGER:
            made.until(partial(_is_back, made, name), f"{name} takes steps again")
            made.client.stop(name)
        assert {made.over(name).reason for name in LONGER} == {"stopped"}
        for name in RUNS[len(LONGER) :]:
            made.completed(name)
        yield made


def _kill_driver(made: World, run: str) -> bool:
    """False where its driver was just ending, since its pool had been killed."""
    try:
        os.kill(made.pid(run, "driver"), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _is_back(made: World, run: str) -> bool:
    return any(step.attempt > 1 for step in made.client.steps(run))


def _has_counted(made: World, run: str, tokens: float) -> bool:
    return lines(made.client.bill())[run].generated >= tokens


def lines(bill: Bill) -> dict[str, BillLine]:
    return {line.key: line for line in bill.rows}


def used_by_pools(made: World) -> float:
    """Seconds from the start to the end of each process of a pool, which the kernel and its shim say."""
    total = 0.0
    for root in sorted(made.home.pools.glob("*/attempts/*")):
        status = msgspec.json.decode(AttemptDir(root).status.read_bytes())
        began = psutil.boot_time() + status["start_time"] / os.sysconf("SC_CLK_TCK")
        total += (status["ended_at"] or time.time()) - began
    return total


def with_a_slot(made: World) -> float:
    """Seconds in which some attempt was between its first and last step: the pool was not nobody's then."""
    spans: dict[tuple[str, int], list[float]] = {}
    for run in RUNS:
        for record, _ in read(made.home.run(run).journal):
            if record.kind == "step":
                spans.setdefault((run, record.attempt), []).append(record.at)
    total, until = 0.0, 0.0
    for first, last in sorted((min(times), max(times)) for times in spans.values()):
        total += max(0.0, last - max(first, until))
        until = max(until, last)
    assert total > 0
    return total


def test_bill_adds_up_to_what_the_pool_used(billed: World) -> None:
    assert len(list(billed.home.pools.glob("*/attempts/*"))) == 2
    before = used_by_pools(billed)
    bill, of_pools = billed.client.bill(), billed.client.bill("pool")
    used = used_by_pools(billed)  # the pool in its second life is idle, and uses more meanwhile
    assert 0.99 * before <= sum(line.held for line in bill.rows) <= 1.01 * used
    assert 0.99 * bill.total.held <= of_pools.total.held <= 1.01 * used
    assert set(lines(bill)) == {*RUNS, ""} and all(lines(bill)[run].busy > 0 for run in RUNS)
    assert lines(bill)[""].held <= 1.01 * used - with_a_slot(billed)


def test_tokens_are_exactly_those_of_the_journals(billed: World) -> None:
    found = lines(billed.client.bill())
    for run in RUNS:
        records = [record for record, _ in read(billed.home.run(run).journal)]
        done = [record for record in records if record.kind == "step"]
        kept = {record.seq for record in lineage(records)}
        for name, metric in (("sampled", "tokens"), ("trained", "trained_tokens")):
            assert getattr(found[run], name) == sum(r.data["metrics"][metric] for r in done) > 0
        thrown = sum(r.data["metrics"]["tokens"] for r in done if r.seq not in kept)
        assert found[run].wasted_tokens == thrown <= found[run].sampled
        # of the pool that was killed its last second is lost, of the one that lives nothing
        later = sum(r.data["metrics"]["tokens"] for r in done if r.attempt > 1)
        billed.until(partial(_has_counted, billed, run, later), f"{later:.0f} tokens of {run} are counted")
    assert found[RUNS[0]].wasted > 0 and found[RUNS[0]].wasted_tokens > 0


def test_bill_survives_the_database(billed: World) -> None:
    def of_runs() -> dict[str, tuple[float, ...]]:
        found = lines(billed.client.bill())
        return {run: (found[run].held, found[run].wasted, found[run].sampled) for run in RUNS}

    before = of_runs()
    billed.lorad("daemon", "stop")
    Path(billed.home.database).unlink()
    for root in billed.home.pools.glob("*/attempts/0001"):
        (root / "usage.jsonl").unlink()  # the daemon's journal has it
    assert repair(billed.home).told == []
    billed.lorad("daemon", "start")
    assert of_runs() == before


def test_served_tokens_are_those_of_the_run(billed: World) -> None:
    made = billed.client.generate(RUNS[3], "312", Sampling(max_new_tokens=5, n=2))
    tokens = sum(len(one.tokens) for one in made.completions)
    assert lines(billed.client.bill())[RUNS[3]].served == tokens > 0
    assert lines(billed.client.bill("alias"))[f"{RUNS[3]}@"].served == tokens


def test_removed_run_stays_on_the_bill(billed: World) -> None:
    before = lines(billed.client.bill())[RUNS[4]]
    billed.lorad("rm", RUNS[4], "--yes")
    after = lines(billed.client.bill())[RUNS[4]]
    assert (after.held, after.sampled, after.disk) == (before.held, before.sampled, None)


def test_bill_of_the_command_line(billed: World) -> None:
    header, *rows = billed.lorad("bill", "--by", "user", "--csv").stdout.splitlines()
    assert header.startswith("user,owner,held,busy,wasted") and len(rows) == 2
    bill = billed.json("bill", "--since", "1h")
    assert all(line["cost"] == pytest.approx(line["held"]) for line in bill["rows"])
    assert "CHF" in billed.lorad("bill").stdout
    assert "2d ago" in billed.lorad("bill", "--since", "2d ago", expect=2).stderr
