"""Models of two users and a run of lorad's share a pool, and each is as it is alone: bit for bit where the
pool is deterministic, and in the same passes where it is not.
"""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorad.box.keys import make_key
from lorad.pool.joint import Joint, JointCall
from lorad.tinker.records import Create, Passed
from tests.kit.pool_kit import TINY, running_pool
from tests.kit.world import SMALL, World
from tests.tinker.crash import RUN, Asker, box, train
from tests.tinker.lane_kit import STEP, LaneRun, pass_of, same, tensors_in

STEPS = 5
WHO = ("alice", "bob", "run")


def began(made: World, who: str) -> None:
    spec = made.spec(SMALL + f"model: {{path: {TINY}}}\n")
    made.lorad("run", spec, "--name", who, "--detach")


def outcomes(*who: str) -> dict[str, Any]:
    """What each was told, or measured, and its tensors, when all train at the same time."""
    found: dict[str, Any] = {}
    with box() as (made, port, _):
        pools: set[str | None] = set()

        def of_client(name: str) -> None:
            asker = Asker(port, make_key(made.home.tinker / "keys.yaml", name))
            train(asker, STEPS, seed=WHO.index(name) * 100)
            run = RUN.format(asker.session)
            pools.add(made.client.show(run).pool)
            found[name] = asker.told, tensors_in(made.home.run(run).root)

        clients = [threading.Thread(target=of_client, args=(name,)) for name in who if name != "run"]
        if "run" in who:
            began(made, "run")
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        if "run" in who:
            pools.add(made.completed("run").pool)
            found["run"] = made.facts("run"), dict[str, np.ndarray]()
        assert len(pools) == 1, pools
    return found


@pytest.mark.system
def test_each_is_as_it_is_alone() -> None:
    together = outcomes(*WHO)
    for name in ("alice", "run"):
        alone = outcomes(name)
        assert together[name][0] == alone[name][0], name
        assert same(together[name][1], alone[name][1]), name
    assert not same(together["alice"][1], together["bob"][1])


def losses(made: LaneRun) -> list[float]:
    return [outcome.metrics["loss:sum"] for outcome in made.told().values() if isinstance(outcome, Passed)]


def test_passes_in_flight_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.pool.joint._SOON", 20.0)  # however busy the machine is
    groups, pair = list[int](), list[LaneRun]()
    plain = Joint._gathered

    async def watched(joint: Joint) -> list[JointCall]:
        # else one may be over before the other is there
        while not all(made.told() for made in pair):  # noqa: ASYNC110 (what is told is polled)
            await asyncio.sleep(0.01)
        calls = await plain(joint)
        groups.append(len(calls))
        return calls

    monkeypatch.setattr(Joint, "_gathered", watched)
    last = 2 * STEPS
    with running_pool(tmp_path, deterministic=False) as running:
        runs = [LaneRun(running, tmp_path, name) for name in ("a", "b", "alone")]
        pair += runs[:2]
        for made, seed in zip(runs, (0, 100, 0), strict=True):
            passes = [pass_of(seed + step, datums=16) for step in range(STEPS)]
            made.ask(Create(), *(wanted for one in passes for wanted in (one, STEP)))
        lanes = [threading.Thread(target=made.serve, args=(last,)) for made in runs[:2]]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        assert groups.count(2) >= 2, groups
        assert runs[2].serve(last).reason == "stopped"
    np.testing.assert_allclose(losses(runs[0]), losses(runs[2]), rtol=1e-4)
