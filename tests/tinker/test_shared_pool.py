"""Models of two users and a run of lorad's share a pool, and each is as it is alone, bit for bit."""

import threading
from typing import Any

import numpy as np

from lorad.box.keys import make_key
from tests.kit.pool_kit import TINY
from tests.kit.world import SMALL, World
from tests.tinker.crash import RUN, Asker, box, train
from tests.tinker.lane_kit import same, tensors_in

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


def test_each_is_as_it_is_alone() -> None:
    together = outcomes(*WHO)
    for name in WHO:
        alone = outcomes(name)
        assert together[name][0] == alone[name][0], name
        assert same(together[name][1], alone[name][1]), name
    assert not same(together["alice"][1], together["bob"][1])
