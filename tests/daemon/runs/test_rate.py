"""A run without trainer.lr gets one that fits when it is made, and keeps it."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from lorad.client.words import rate_in_words
from lorad.daemon.api.verbs.resume import change_spec
from lorad.daemon.runs.rate import rated
from lorad.errors import SpecError
from lorad.protocol.preflight import SpecFacts
from lorad.records.runs import RunDetails
from lorad.spec.model import convert
from tests.kit.daemon_world import serving

FACTS = SpecFacts(model_type="qwen3", hidden_size=4096)
OWN = {"path": "/m"}


def test_a_rate_is_filled_in_once() -> None:
    spec, facts = rated(convert({"model": OWN}), FACTS)
    assert spec.trainer.lr == 5.91e-5 and not facts.warnings
    assert rated(spec, FACTS) == (spec, facts)


def test_a_critic_gets_the_undivided_rate() -> None:
    ppo = {"model": OWN, "algorithm": {"name": "ppo"}}
    spec, facts = rated(convert(ppo), FACTS)
    assert (spec.trainer.lr, spec.algorithm.critic.lr) == (5.91e-5, 4.73e-4)
    assert rated(spec, FACTS) == (spec, facts)
    assert rated(convert(ppo | {"trainer": {"lr": 1e-4}}), FACTS)[0].algorithm.critic.lr is None


def test_a_given_rate_stays_and_is_doubted() -> None:
    spec, facts = rated(convert({"model": OWN, "trainer": {"lr": 6e-7}}), FACTS)
    assert spec.trainer.lr == 6e-7 and facts.rate is not None and facts.rate.lr == 5.91e-5
    assert facts.warnings[0].startswith("trainer.lr: 6e-07 is 98 times below 5.91e-05")


def test_a_floor_above_the_chosen_rate_is_refused() -> None:
    with pytest.raises(SpecError, match=r"trainer.min_lr: 0.001 is more than trainer.lr 5.91e-05"):
        rated(convert({"model": OWN, "trainer": {"min_lr": 1e-3}}), FACTS)


def test_a_resume_keeps_the_rate_of_the_run() -> None:
    spec, _ = rated(convert({"model": OWN}), FACTS)
    for overrides in (["trainer.lr=null"], ["trainer={steps: 7}"], ["trainer.steps=7"]):
        assert change_spec(spec, overrides).trainer.lr == 5.91e-5
    assert change_spec(spec, ["trainer.lr=1e-4"]).trainer.lr == 1e-4


def test_show_says_whether_the_rate_fits() -> None:
    facts = rated(convert({"model": OWN}), FACTS)[1]
    shown = RunDetails("a", "queued", spec={"trainer": {"lr": 5.91e-5}}, rate=facts.rate)
    assert rate_in_words(shown) == "trainer.lr is 5.91e-05: it fits grpo on qwen3 of hidden size 4096"
    other = replace(shown, spec={"trainer": {"lr": 1e-3}})
    assert rate_in_words(other).startswith("trainer.lr is 0.001; 5.91e-05 fits grpo on qwen3")


async def test_a_run_is_made_with_a_fitting_rate(home: Path) -> None:
    async with serving(home) as api:
        spec = "{data: {train: sort}, trainer: {steps: 2}}"
        await api("run", spec, source="s", cwd="/", overrides=[], name="a")
        shown = await api.until("a", "ended")
        assert shown.rate is not None and shown.spec["trainer"]["lr"] == shown.rate.lr == 1e-3
