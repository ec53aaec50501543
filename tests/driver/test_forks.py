"""Episodes whose history is replaced: rows fork, and weigh together what the episode weighs."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from lorad.driver.attempt.main import StopFlag
from lorad.driver.rewards import Score
from lorad.driver.sampling.rows import batch_of
from lorad.driver.score import choose
from lorad.driver.session import Sample, Session, State, TrainBatch
from lorad.driver.train import _minibatch, sequence_log_ratios
from lorad.driver.weigh import gather, minibatch_ranges, weigh
from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets
from lorad.records.episodes import Fork
from lorad.rl.data import Example
from lorad.rl.loss import sequence_ratios, token_targets
from lorad.spec.algorithm import Ratio
from lorad.spec.text import load_spec
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.conformance.reference import write_random_model
from tests.conformance.trainer_kit import flat, open_trained
from tests.driver.driven import Driven
from tests.kit.pool_kit import Running, running_pool

TURNS = (5, 2, 4)  # sampled tokens; two of the environment's stand between turns of one row
ENVS = """
from lorad.envs.lookup import Lookup
from lorad.envs.protocol import Observation

class Forgets(Lookup):
    '''lookup, in which the model reads nothing but the last observation.'''
    def step(self, turn):
        found = super().step(turn)
        if found.messages is None:
            return found
        return Observation(found.messages.strip(), found.reward, found.metrics, replaces=True)
"""

FORGETS = ("data.train=lookup", "env={name: 'envs.py:Forgets', turns: 3}")


def episode(seed: int, forks: tuple[int, ...] = ()) -> Sample:
    """Three turns. forks: the turns that begin a row."""
    rng = np.random.default_rng(seed)
    turns = [rng.integers(0, 50, size).astype(np.int32) for size in TURNS]
    tokens, mask, found = [turns[0]], [np.ones(TURNS[0], np.bool_)], []
    for number in (1, 2):
        if number in forks:
            found.append(Fork(sum(part.size for part in tokens), rng.integers(0, 50, 3).tolist()))
        else:
            tokens.append(np.array([7, 8], np.int32))
            mask.append(np.zeros(2, np.bool_))
        tokens.append(turns[number])
        mask.append(np.ones(TURNS[number], np.bool_))
    logprobs = np.full(sum(TURNS), -1, np.float32)
    columns = ("r@0", np.concatenate(tokens), logprobs, "stop", "", np.concatenate(mask))
    return Sample(Example("one", "", "", [1, 2], {}), 0, *columns, forks=tuple(found))


def step(level: str, forks: tuple[int, ...]) -> tuple[TrainBatch, PolicyTargets, list[Any]]:
    """Two groups of two episodes; one of the first group forks."""
    how = ["data.prompts_per_step=2", "algorithm={group_size: 2, minibatches: 2}", f"algorithm.level={level}"]
    spec = load_spec("data: {train: sort}", overrides=how)
    session: Any = SimpleNamespace(spec=spec, seconds={}, state=State(), kl_coef=0.0)
    session.timed = lambda verb: Session.timed(session, verb)
    session.params = SimpleNamespace(reference=None)
    said = [np.zeros(2 * sum(TURNS), np.float32)] * 2
    session.pool = SimpleNamespace(call=lambda *_: SimpleNamespace(logprobs=said.pop()))
    groups = [[episode(0, forks), episode(1)], [episode(2), episode(3)]]
    rollout: Any = SimpleNamespace(groups=groups, samples=[s for group in groups for s in group])
    scored = choose(cast(Session, session), rollout, [Score(r) for r in (1.0, 0.0, 0.25, 0.5)])
    weighed = weigh(session, rollout, scored, known := gather(session, rollout, scored))
    ranges = minibatch_ranges(spec, rollout)
    steps = [_minibatch(session, rollout, scored, weighed, *groups) for groups in ranges]
    return known, weighed.targets, steps


@pytest.mark.parametrize("level", ["token", "sequence", "prompt"])
@pytest.mark.parametrize("forks", [(1,), (2,), (1, 2)])
def test_forks_change_no_weight(level: str, forks: tuple[int, ...]) -> None:
    _, whole, steps = step(level, ())
    known, forked, others = step(level, forks)
    assert forked.weights is not None and whole.weights is not None
    np.testing.assert_array_equal(forked.weights, whole.weights)
    np.testing.assert_array_equal(forked.advantages, whole.advantages)
    assert [m.normaliser for m in others] == [m.normaliser for m in steps] and len(steps) == 2
    assert [m.batch.targets.tolist() for m in others] == [m.batch.targets.tolist() for m in steps]
    assert known.batch.completion_lengths.size == 4 + len(forks)
    if level == "sequence":
        assert forked.weights[: sum(TURNS)].sum() == pytest.approx(1)


async def test_forked_rows_train_like_rows_alone(tmp_path: Path) -> None:
    compute = Compute()
    trainer = BuiltinTrainer(
        load_base(write_random_model(tmp_path), torch.float32, torch.device("cpu")), compute, str(tmp_path)
    )
    whole = batch_of([[episode(0, (1, 2)), episode(1, (2,))], [episode(2)]])
    rng = np.random.default_rng(1)
    advantages, weights = rng.normal(0, 1, (2, whole.targets.size)).astype(np.float32)
    gradients = []
    for cut in (False, True):
        await open_trained(trainer, "slot")
        before, start = flat(await trainer.export("slot")), 0
        for place in range(whole.group_sizes.size if cut else 1):
            part = whole.part(slice(place, place + 1)) if cut else whole
            tokens = slice(start, start + part.targets.size)
            start = tokens.stop
            targets = PolicyTargets(advantages[tokens], weights=np.abs(weights[tokens]))
            await trainer.forward_backward("slot", part, targets, PolicyLoss("linear"), 7.0)
        await trainer.optim_step("slot", 1e-3, 0.0)
        gradients.append(flat(await trainer.export("slot")) - before)
        await trainer.close("slot")
    compute.close()
    assert whole.group_sizes.tolist() == [1, 1, 1, 1, 1, 1] and np.abs(gradients[0]).max() > 1e-4
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-6)


@pytest.mark.parametrize("ratio", ["sequence", "geometric"])
def test_forked_rows_have_the_ratio_of_their_episode(ratio: Ratio) -> None:
    rng, loss = np.random.default_rng(4), PolicyLoss(ratio=ratio, clip_low=0.2, clip_high=0.3)
    lengths = np.array([sum(TURNS)] * 3)
    now, old, advantages = rng.normal(-2, 0.3, (3, lengths.sum())).astype(np.float32)
    targets = PolicyTargets(advantages, now, old_logprobs=old)
    given = sequence_log_ratios(now, old, targets, loss, lengths)
    whole = token_targets(targets, slice(None), torch.device("cpu"))
    found = sequence_ratios(torch.from_numpy(now), whole, loss, torch.from_numpy(lengths)).sequence
    assert found is not None and np.abs(given).min() > 1e-4
    np.testing.assert_allclose(given, found, atol=1e-6)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    home = tmp_path_factory.mktemp("runs")
    (home / "envs.py").write_text(ENVS)
    with running_pool(home / "pool", deterministic=True) as running:
        yield running, home


@pytest.mark.system
def test_runs_give_the_ratios_of_episodes(
    pool: tuple[Running, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows fork, each episode is given one ratio, which is 1 in the first update of a step."""
    seen: list[tuple[Batch, PolicyTargets]] = []
    real = BuiltinTrainer.forward_backward

    async def noted(self: BuiltinTrainer, slot: str, batch: Batch, targets: PolicyTargets, *more: Any) -> Any:
        seen.append((batch, targets))
        return await real(self, slot, batch, targets, *more)

    monkeypatch.setattr(BuiltinTrainer, "forward_backward", noted)
    how = ("algorithm={name: gspo, group_size: 4, epochs: 2}", "trainer.steps=1", "lora.dropout=0")
    run = Driven(*pool, "gspo", *FORGETS, *how)
    assert run.drive().reason == "completed"
    (batch, first), (_, second) = seen
    given = second.sequence_log_ratios
    assert first.sequence_log_ratios is not None and not first.sequence_log_ratios.any()
    lines = map(
        msgspec.json.decode, (run.run.root / run.facts("step")[0].data["samples"]).read_text().splitlines()
    )
    lengths = [len(line["logprobs"]) for line in lines if line["advantage"]]
    assert given is not None and sum(lengths) == given.size and len(lengths) < batch.completion_lengths.size
    each = [np.unique(part).tolist() for part in np.split(given, np.cumsum(lengths)[:-1])]
    assert {len(values) for values in each} == {1} and len({values[0] for values in each}) > 1


@pytest.fixture(scope="module")
def runs(pool: tuple[Running, Path]) -> Iterator[tuple[Driven, Driven]]:
    """A run whose rows fork, and one like it that stops and is resumed."""
    running, home = pool
    how = (
        *(*FORGETS, "rollout.max_staleness=1", "algorithm.minibatches=2"),
        *("trainer.steps=2", "checkpoint.every=1", "eval.every=2"),
    )
    calm, resumed = (Driven(running, home, name, *how) for name in ("calm", "resumed"))
    assert calm.drive().reason == "completed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            StopFlag, "wanted", property(lambda _: bool(resumed.facts("checkpoint"))), raising=False
        )
        patch.setattr(StopFlag, "__init__", lambda _: None)
        resumed.drive()
    assert resumed.drive().reason == "completed" and len(resumed.facts("attempt")) == 2
    yield calm, resumed


@pytest.mark.system
def test_engine_and_trainer_agree_on_forked_rows(runs: tuple[Driven, Driven]) -> None:
    calm, resumed = runs
    lines = (calm.run.root / calm.facts("step")[0].data["samples"]).read_text().splitlines()
    made = [msgspec.json.decode(line) for line in lines]
    forked = [line for line in made if line.get("rows", 1) > 1]
    assert forked and all(len(line["forks"]) == line["rows"] - 1 for line in forked)
    assert all([turn["row"] for turn in line["turns"]] == [*range(line["rows"])] for line in forked)
    assert all(turn["observed"] == 0 for line in forked for turn in line["turns"])
    metrics = calm.facts("step")[0].data["metrics"]
    assert metrics["rows"] > 1 and metrics["logprob_difference"] == pytest.approx(0, abs=1e-4)
    assert resumed.outcome() == calm.outcome()
