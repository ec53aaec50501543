"""The learning rate that fits a model and an algorithm, and what is said of others."""

import re
from collections.abc import Iterator

import pytest

from lorad.protocol.preflight import Rate
from lorad.rl.rate import fitting_rate, rate_doubts
from lorad.spec.model import Spec, convert
from tests.kit.world import REPOSITORY

RATE = Rate(4e-4, "sft on qwen3")
PAGE = (REPOSITORY / "docs" / "algorithms.md").read_text()
SHAPES = {  # model_type and hidden_size of their config.json
    "Qwen2-7B": ("qwen2", 3584),
    "Qwen2.5-0.5B": ("qwen2", 896),
    "Qwen2.5-1.5B": ("qwen2", 1536),
    "Qwen2.5-72B": ("qwen2", 8192),
    "Qwen3-0.6B": ("qwen3", 1024),
    "Qwen3-4B": ("qwen3", 2560),
    "Qwen3-8B": ("qwen3", 4096),
    "Qwen3-30B-A3B": ("qwen3_moe", 2048),
    "Qwen3.5-0.8B": ("qwen3_5", 1024),
    "Qwen3.5-9B": ("qwen3_5", 4096),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe", 2048),
}


def spec(name: str = "grpo", path: str = "m", lr: float | None = None, rank: int = 16) -> Spec:
    sections = {"trainer": {"lr": lr}, "lora": {"rank": rank}}
    return convert({"model": {"path": path}, "algorithm": {"name": name}, **sections})


def rate(model_type: str, width: int, name: str = "grpo", path: str = "m") -> float:
    return fitting_rate(spec(name, path), model_type, width).lr


def recipes() -> Iterator[tuple[str, int, float]]:
    """Read base, rank and rate of each recipe in the table of docs/algorithms.md."""
    table = PAGE.partition("| published recipe |")[2].partition("\n\n")[0]
    for base, rank, lr in re.findall(r"^\|[^|]+\| (\S+) \| (\d+) \| (\S+) \|", table, re.MULTILINE):
        yield base, int(rank), float(lr)


@pytest.mark.parametrize(
    ("model_type", "width", "lr"),
    [
        ("qwen3", 4096, 4.73e-4),  # Tinker's get_lr("Qwen/Qwen3-8B")
        ("qwen3_moe", 2048, 4.99e-4),
        ("llama", 4096, 2.86e-4),  # and of meta-llama/Llama-3.1-8B
        ("llama", 8192, 1.66e-4),
    ],
)
def test_rates_are_those_of_the_formula(model_type: str, width: int, lr: float) -> None:
    assert rate(model_type, width, "sft") == lr


def test_reinforcement_learning_takes_an_eighth_of_it() -> None:
    assert (rate("qwen3", 4096), rate("qwen3", 4096, "ppo")) == (5.91e-5, 5.91e-5)
    assert rate("qwen3", 4096, "dpo") == 9.46e-6


def test_bases_below_the_published_ones_keep_it() -> None:
    assert rate("llama", 576) == rate("llama", 895) == 8.43e-4  # SmolLM2-135M
    assert rate("llama", 896) == 1.05e-4


def test_an_unknown_family_takes_the_lower_rate() -> None:
    assert rate("gemma3", 4096) == rate("llama", 4096)
    assert rate("gemma3", 1024) == rate("qwen3", 1024)
    assert "the lower of" in fitting_rate(spec(), "gemma3", 4096).why


def test_models_below_the_formula_take_its_end() -> None:
    assert rate("llama", 64, "sft") == rate("llama", 1024, "sft") == 8.43e-4
    assert rate("", 0) == rate("llama", 8192)


def test_the_tiny_base_keeps_its_rate() -> None:
    assert rate("qwen3", 128, path="builtin:tiny") == 1e-3


def test_a_rate_ten_times_off_is_doubted() -> None:
    (doubt,) = rate_doubts(spec("sft", lr=3.9e-5), RATE)
    assert doubt.startswith("trainer.lr: 3.9e-05 is 10 times below 0.0004, which fits sft on qwen3")
    assert "12 times above 0.0004" in rate_doubts(spec("sft", lr=4.8e-3), RATE)[0]
    assert [rate_doubts(spec("sft", lr=lr), RATE) for lr in (4.1e-5, 3.9e-3, 0.0, None)] == [[]] * 4


@pytest.mark.parametrize(("base", "rank", "lr"), recipes())
def test_no_published_recipe_is_called_wrong(base: str, rank: int, lr: float) -> None:
    recipe = spec(lr=lr, rank=rank)
    assert rate_doubts(recipe, fitting_rate(recipe, *SHAPES[base])) == []


def test_the_default_is_amid_the_recipes() -> None:
    of_low_ranks = sorted(lr for _, rank, lr in recipes() if rank < 64)
    assert of_low_ranks[1] < rate("qwen3", 4096) < of_low_ranks[-2] and len(of_low_ranks) >= 12


@pytest.mark.parametrize(("lr", "says"), [(9e-7, "66 times below"), (1e-3, "17 times above")])
def test_rates_beyond_all_recipes_are_doubted(lr: float, says: str) -> None:
    (doubt,) = rate_doubts(spec(lr=lr), fitting_rate(spec(), "qwen3", 4096))
    assert f"{says} 5.91e-05" in doubt and "published runs over LoRA have 1e-06 to 0.00017" in doubt


def test_high_ranks_are_doubted_with_the_paper() -> None:
    (may,) = rate_doubts(spec(rank=64), RATE)
    (will,) = rate_doubts(spec(rank=128), RATE)
    assert may.startswith("lora.rank: 64 may collapse") and will.startswith("lora.rank: 128 will probably")
    assert "openreview.net/forum?id=XGZHI14m8P" in may
    assert [rate_doubts(spec(name, rank=rank), RATE) for name, rank in (("grpo", 63), ("sft", 128))] == [
        [],
        [],
    ]
    assert rate_doubts(spec("dpo", rank=128), RATE) == rate_doubts(spec("distill", rank=128), RATE) == []


def test_a_critic_has_the_rate_of_sft() -> None:
    policy = fitting_rate(spec("ppo"), "qwen3", 4096)
    assert policy.critic == rate("qwen3", 4096, "sft") == pytest.approx(8 * policy.lr, rel=0.01)
    assert fitting_rate(spec("grpo"), "qwen3", 4096).critic is None
    assert fitting_rate(spec("ppo", "builtin:tiny"), "", 0) == Rate(1e-3, "ppo on builtin:tiny", 1e-3)
