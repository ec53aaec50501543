"""Keys by the names that TRL, SkyRL, miles, vime and verl have for them."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lorad.errors import SpecError
from lorad.spec.errors import leaves
from lorad.spec.model import Spec, convert
from lorad.spec.synonyms import SYNONYMS, called_elsewhere

PAGE = Path(__file__).parents[2] / "docs" / "migrate-from.md"
NO_KEYS = {"PeftModel", "model", "create_loraplus_optimizer"}  # of others, named on the page
MINIBATCHES, NEW_TOKENS = "algorithm.minibatches", "rollout.max_new_tokens"
SECTIONS = {field.name for field in msgspec.structs.fields(Spec)}
KEYS = {*leaves(Spec), *SECTIONS}


def names_in(cell: str) -> Iterator[str]:
    """The names between backticks, those in braces one by one."""
    for quoted in re.findall(r"`([^`]+)`", cell):
        before, brace, inner = quoted.partition("{")
        ends = inner.partition("}")[0].split(",") if brace else [""]
        yield from (f"{before}{end.strip()}".split()[0].partition("=")[0] for end in ends)


def rows() -> list[tuple[list[str], list[str]]]:
    """The table of the page: keys of the spec, and what others call them."""
    table = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [([*names_in(row[0])], [name for cell in row[1:] for name in names_in(cell)]) for row in table]


def test_every_synonym_leads_to_a_key() -> None:
    assert {key for key in SYNONYMS.values() if key not in KEYS} == set()


def test_few_synonyms_are_keys_of_another_meaning() -> None:
    """Where such a key is unknown, what others mean by it is likelier."""
    last = {key.rpartition(".")[2]: key for key in leaves(Spec) if key.count(".") == 1}
    differ = {word: key for word, key in SYNONYMS.items() if word in last and last[word] != key}
    assert set(differ) <= {"batch_size", "epochs", "label_key", "max_tokens", "model"}


def test_the_page_and_the_list_agree() -> None:
    table = rows()
    assert len(table) > 30
    unlike = []
    for keys, others in table:
        for name in others:
            word = name.lstrip("-").rpartition(".")[2].replace("-", "_")
            mine = {key.partition(":")[0] for key in keys}
            is_same = any(key.rpartition(".")[2] == word for key in mine)
            if not (is_same or any(called_elsewhere(name).startswith(key) for key in mine)):
                unlike.append(name)
    assert set(unlike) <= NO_KEYS


def verl(key: str, value: object) -> dict[str, object]:
    """A key below actor_rollout_ref, as verl has it."""
    for word in reversed(f"actor_rollout_ref.{key}".split(".")):
        value = {word: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    ("spec", "key", "meant"),
    [
        ({"beta": 0.1}, "beta", "algorithm.kl.coef or algorithm.preference.beta"),
        ({"learning_rate": 1e-5}, "learning_rate", "trainer.lr"),
        ({"num_generations": 8}, "num_generations", "algorithm.group_size"),
        ({"lora": {"r": 8}}, "lora.r", "lora.rank"),
        ({"batch_size": 8}, "batch_size", "data.prompts_per_step or reward.batch_size"),
        ({"lr": 1e-5}, "lr", "trainer.lr"),
        (verl("rollout.n", 5), "actor_rollout_ref.rollout.n", "algorithm.group_size"),
        (verl("actor.optim.lr", 1e-5), "actor_rollout_ref.actor.optim.lr", "trainer.lr"),
        (verl("model.path", "x"), "actor_rollout_ref.model.path", "model.path"),
        (
            verl("rollout.tensor_model_parallel_size", 2),
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            "rollout.tp",
        ),
        (verl("actor.ppo_mini_batch_size", 64), "actor_rollout_ref.actor.ppo_mini_batch_size", MINIBATCHES),
        (verl("rollout.val_kwargs.n", 8), "actor_rollout_ref.rollout.val_kwargs.n", "eval.sets"),
        (verl("rollout.response_length", 8), "actor_rollout_ref.rollout.response_length", NEW_TOKENS),
        ({"algorithm": {"adv_estimator": "grpo"}}, "algorithm.adv_estimator", "algorithm.name"),
        ({"algorithm": {"kl_ctrl": {"type": "fixed"}}}, "algorithm.kl_ctrl.type", "algorithm.kl.target"),
        ({"data": {"filter_overlong_prompts": True}}, "data.filter_overlong_prompts", "data.too_long"),
    ],
)
def test_a_key_of_others_is_answered_with_ours(spec: dict[str, object], key: str, meant: str) -> None:
    with pytest.raises(SpecError) as refused:
        convert(spec)
    assert (refused.value.key, refused.value.hint) == (key, f"Did you mean {meant}?")
