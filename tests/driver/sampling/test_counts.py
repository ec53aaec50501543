"""How many samples have ended, as the driver tells while they are made."""

from pathlib import Path

import pytest

from lorad.driver.sample import make, plan
from lorad.driver.sampling import generate
from lorad.pool.verbs import generate as pool_side
from lorad.protocol.heartbeat import Count
from tests.driver.driven import Driven
from tests.kit.pool_kit import running_pool

EPISODES = ("data.train=lookup", "env={name: lookup, turns: 2}", "rollout.max_new_tokens=4")


@pytest.mark.parametrize(
    "how", [(), (*EPISODES, "deterministic=true"), (*EPISODES, "deterministic=false")], ids=str
)
def test_samples_are_counted_as_they_end(
    how: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, came = list[str](), list[int]()

    class Heard(Count):
        def __init__(self, verb: str, total: int) -> None:
            super().__init__(verb, total, told.append)

        def add(self, *, ended: int = 0, tokens: int = 0) -> None:
            super().add(ended=ended, tokens=tokens)
            came.append(tokens)

    monkeypatch.setattr(generate, "Count", Heard)
    monkeypatch.setattr(pool_side, "GATHER_SECONDS", 0.0)
    with running_pool(tmp_path, deterministic=False) as pool:
        run = Driven(pool, tmp_path, "a", "eval.every=0", *how)
        with run.begun() as session:
            rollout = make(session, session.pool, plan(session, 0, 0, session.state.version, 0, {}))
    counts = [int(words.split()[1]) for words in told]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 16
    assert told[0] == "sampling 0 of 16" and sum(came) == rollout.tokens
    assert sum(tokens > 0 for tokens in came) > 1  # though no reward reads samples as they end
