"""A run over two nodes, both of them this machine: killed twice, or asked to leave one, it ends like one on a
single machine.
"""

import contextlib
import os
import signal
import sqlite3

import pytest

from lorad.daemon.process.processes import read_status
from lorad.protocol.journal import read
from tests.kit.world import world
from tests.nodes.spread import NAME, alone, granted, life, reached, start, steps_of


@pytest.mark.long
def test_kills_of_a_spread_run_change_nothing() -> None:
    with world() as made:
        expected = alone(made, 9)
        start(made, 9)
        reached(made, 1, 3)
        os.kill((read_status(life(made)) or {})["pid"], signal.SIGKILL)
        reached(made, 2, 6)
        os.kill(granted(made).nodes[1].pid, signal.SIGKILL)
        over = made.completed(NAME)
        assert over.attempt == 3
        assert made.facts(NAME) == expected
        placed = [r.data for r, _ in read(made.home.run(NAME).journal) if r.kind == "placed"]
        assert [[node["node"] for node in one["nodes"]] for one in placed] == [["h1", "h2"]] * 3
        assert {one["ranks"] for one in placed} == {2}
        (first, _) = made.client.nodes()
        assert (first.state, len(first.agents)) == ("granted", 1)
        with contextlib.closing(sqlite3.connect(f"file:{made.home.database}?mode=ro", uri=True)) as store:
            kinds = {kind for (kind,) in store.execute("SELECT kind FROM events WHERE run = ?", (NAME,))}
        assert {"granted", "grant_lost", "node_lost"} <= kinds


@pytest.mark.long
def test_a_run_leaves_a_node_after_its_step() -> None:
    """An agent gets SIGTERM: no step is made twice, and the run resumes in another life of the pool."""
    with world() as made:
        expected = alone(made, 20)
        start(made, 20)
        reached(made, 1, 3)
        os.kill(granted(made).nodes[1].pid, signal.SIGTERM)
        over = made.completed(NAME)
        assert (over.attempt, over.attempts[0].reason) == (2, "stopped")
        assert [*steps_of(made, 1), *steps_of(made, 2)] == [*range(1, 21)]
        assert made.facts(NAME) == expected
