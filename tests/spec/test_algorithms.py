"""Names of algorithms, the parts that they stand for, and parts that do nothing together."""

import pytest

from lorad.errors import SpecError
from lorad.rl.doubts import doubts, refuse_contradictions
from lorad.spec.algorithm import PRESETS, Algorithm
from lorad.spec.model import Spec
from lorad.spec.text import load_spec


def spec(algorithm: str) -> Spec:
    return load_spec(f"algorithm: {algorithm}")


@pytest.mark.parametrize("name", PRESETS)
def test_every_name_stands_for_its_parts(name: str) -> None:
    own = ", loss: mine.py:loss" * (name == "custom")
    found = spec(f"{{name: {name}, kl: {{reference: teacher@1}}{own}}}")
    assert found.algorithm.parts == PRESETS[found.algorithm.name]
    refuse_contradictions(found)


def test_given_part_wins_over_the_name() -> None:
    parts = spec("{name: gspo, clip: [0.1, 0.3], baseline: loo, scale: one}").algorithm.parts
    assert (parts.clip, parts.baseline, parts.ratio, parts.level) == (
        (0.1, 0.3),
        "loo",
        "sequence",
        "sequence",
    )


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ("{name: cispo, clip: [0.1, 0.1]}", "algorithm.clip"),
        ("{name: cispo, dual: 3.0}", "algorithm.dual"),
        ("{name: gmpo, dual: 3.0}", "algorithm.dual"),
        ("{bounds: [0.0, 2.0]}", "algorithm.bounds"),
        ("{negative_bounds: [0.0, 1.0]}", "algorithm.negative_bounds"),
        ("{surrogate: dro, ratio: sequence}", "algorithm.ratio"),
        ("{surrogate: soft, ratio: geometric}", "algorithm.ratio"),
        ("{baseline: loo}", "algorithm.scale"),
        ("{name: reinforce, drop_zero_variance: true}", "algorithm.drop_zero_variance"),
        ("{scale: whiten, drop_zero_variance: true}", "algorithm.drop_zero_variance"),
        ("{importance_cap: 2.0, correction: {}}", "algorithm.importance_cap"),
        ("{name: dppo, importance_cap: 2.0}", "algorithm.importance_cap"),
        ("{name: dppo, correction: {}}", "algorithm.correction"),
        ("{surrogate: dro, correction: {}}", "algorithm.correction"),
        ("{name: gmpo, correction: {kind: token_mask}}", "algorithm.correction"),
        ("{correction: {low: 3.0}}", "algorithm.correction.low"),
        ("{lam: 0.9}", "algorithm.lam"),
        ("{name: rloo, critic: {rank: 4}}", "algorithm.critic"),
        ("{name: ppo, scale: std}", "algorithm.scale"),
        ("{name: ppo, surrogate: nll}", "algorithm.surrogate"),
        ("{name: ppo, critic: {warmup_steps: 60}}", "algorithm.critic.warmup_steps"),
        ("{name: ppo, drop_zero_variance: true}", "algorithm.drop_zero_variance"),
        ("{name: cispo, bounds: [2.0, 1.0]}", "algorithm.bounds"),
        ("{name: custom}", "algorithm.name"),
        ("{user_code: {timeout: 1.0}}", "algorithm.user_code"),
        ("{loss: 'm.py:f', clip: [0.1, 0.1]}", "algorithm.clip"),
        ("{loss: 'm.py:f', surrogate: clip}", "algorithm.surrogate"),
        ("{loss: 'm.py:f', level: token}", "algorithm.level"),
        ("{loss: 'm.py:f', importance_cap: 2.0}", "algorithm.importance_cap"),
        ("{loss: 'm.py:f', correction: {}}", "algorithm.correction"),
        ("{loss: 'm.py:f', drop_zero_variance: true}", "algorithm.drop_zero_variance"),
        ("{name: rft, loss: 'm.py:f'}", "algorithm.loss"),
        ("{name: ppo, advantage: 'm.py:f'}", "algorithm.advantage"),
        ("{name: distill, kl: {reference: a@1}, advantage: 'm.py:f'}", "algorithm.advantage"),
        ("{advantage: 'm.py:f', baseline: loo}", "algorithm.baseline"),
        ("{advantage: 'm.py:f', scale: one}", "algorithm.scale"),
        ("{group_size: 1}", "algorithm.group_size"),
        ("{name: rloo, kl: {coef: 0.1, type: k3}}", "algorithm.kl.type"),
        ("{name: rft, kl: {coef: 0.1, where: reward}}", "algorithm.kl.where"),
        ("{kl: {target: 0.1}}", "algorithm.kl.target"),
        ("{truncated: mask, kl: {coef: 0.1, where: reward}}", "algorithm.truncated"),
        ("{name: reinforce, dynamic_sampling: {}}", "algorithm.dynamic_sampling"),
        ("{best: 2}", "algorithm.best"),
        ("{least: 0.5}", "algorithm.least"),
        ("{name: rft, scale: std}", "algorithm.scale"),
        ("{name: rft, importance_cap: 2.0}", "algorithm.importance_cap"),
        ("{name: distill}", "algorithm.kl.reference"),
        ("{name: distill, kl: {reference: a@1, coef: 0}}", "algorithm.kl.coef"),
        ("{name: distill, kl: {reference: a@1, where: loss}}", "algorithm.kl.where"),
        ("{name: distill, teacher: big, kl: {coef: 0}}", "algorithm.kl.coef"),
        ("{name: distill, teacher: big, kl: {reference: start}}", "algorithm.kl.reference"),
        ("{name: distill, teacher: big, kl: {reset_every: 5}}", "algorithm.kl.reset_every"),
        ("{teacher: big}", "algorithm.teacher"),
        ("{kl: {reset_every: 5}}", "algorithm.kl.reset_every"),
        ("{reward_coef: 1.0}", "algorithm.reward_coef"),
        ("{dynamic_sampling: {keep: [0.9, 0.1]}}", "algorithm.dynamic_sampling.keep"),
    ],
)
def test_parts_that_do_not_fit_are_refused(algorithm: str, key: str) -> None:
    with pytest.raises(SpecError) as refused:
        refuse_contradictions(spec(algorithm))
    assert refused.value.key == key and refused.value.hint


def test_dropout_with_several_updates_is_refused() -> None:
    with pytest.raises(SpecError) as refused:
        refuse_contradictions(load_spec("{lora: {dropout: 0.1}, algorithm: {epochs: 2}}"))
    assert refused.value.key == "lora.dropout"


def test_dapo_is_all_of_dapo() -> None:
    algorithm = spec("{name: dapo}").algorithm
    assert algorithm.refill is not None and algorithm.cost_of_length is not None
    assert algorithm.parts.clip == (0.2, 0.28) and algorithm.parts.level == "token"
    assert "dynamic sampling" in algorithm.in_words and "overlong" in algorithm.in_words


def test_a_single_sample_needs_no_group() -> None:
    for algorithm in ("{name: reinforce, group_size: 1}", "{name: rft, least: 1.0, group_size: 1}"):
        refuse_contradictions(spec(algorithm))


def test_names_that_are_grpo_here_warn() -> None:
    assert [text for text in doubts(spec("{name: gspo}")) if text.startswith("algorithm.name: gspo")]
    assert not [text for text in doubts(spec("{name: gspo, minibatches: 2}")) if "algorithm.name" in text]


def test_groups_without_gradient_are_left_out() -> None:
    assert Algorithm().drops and not Algorithm(drop_zero_variance=False).drops
    assert not Algorithm(name="reinforce").drops and not Algorithm(scale="whiten").drops


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("algorithm: {name: sft, group_size: 4}", "algorithm.group_size"),
        ("algorithm: {name: sft, kl: {coef: 0.1}}", "algorithm.kl"),
        ("algorithm: {name: sft, clip: [0.1, 0.1]}", "algorithm.clip"),
        ("{algorithm: sft, rollout: {max_staleness: 1}}", "rollout.max_staleness"),
        ("{algorithm: sft, rollout: {top_k: 4}}", "rollout.top_k"),
        ("data: {format: messages}", "data.format"),
        ("algorithm: {preference: {beta: 0.2}}", "algorithm.preference"),
        ("algorithm: {name: dpo, preference: {gamma: 0.2}}", "algorithm.preference.gamma"),
        ("algorithm: {name: dpo, preference: {loss: ipo, smoothing: 0.2}}", "algorithm.preference.smoothing"),
        ("algorithm: {name: dpo, preference: {loss: kto, nll: 0.2}}", "algorithm.preference.nll"),
        ("algorithm: {name: dpo, kl: {coef: 0.2}}", "algorithm.kl"),
        (
            "algorithm: {name: dpo, preference: {loss: simpo}, kl: {reference: base}}",
            "algorithm.kl.reference",
        ),
        ("data: {completion_key: said}", "data.completion_key"),
    ],
)
def test_keys_that_nothing_reads_are_refused(text: str, key: str) -> None:
    with pytest.raises(SpecError, match="it has no effect") as refused:
        refuse_contradictions(load_spec(text))
    assert refused.value.key == key and refused.value.hint


def test_a_name_alone_is_an_algorithm() -> None:
    assert load_spec("algorithm: sft").algorithm == Algorithm(name="sft")
    assert load_spec("algorithm: dppo", overrides=["algorithm.epochs=2"]).algorithm.epochs == 2
    with pytest.raises(SpecError, match=r"spec:1: algorithm\.name"):
        load_spec("algorithm: sfd")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{algorithm: dpo, lora: {dropout: 0.1}}", "lora.dropout"),
        (
            "{algorithm: {name: dpo, preference: {loss: kto}}, data: {prompts_per_step: 1}}",
            "data.prompts_per_step",
        ),
    ],
)
def test_preferences_refuse_what_spoils_them(text: str, key: str) -> None:
    with pytest.raises(SpecError) as refused:
        refuse_contradictions(load_spec(text))
    assert refused.value.key == key and refused.value.hint


def test_a_critic_allows_groups_of_one() -> None:
    refuse_contradictions(spec("{name: ppo, group_size: 1}"))
    with pytest.raises(SpecError, match="group of one"):
        refuse_contradictions(spec("{group_size: 1}"))
