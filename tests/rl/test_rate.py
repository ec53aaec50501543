"""The learning rate that fits a model and an algorithm."""

import pytest

from lorad.protocol.preflight import Rate
from lorad.rl.rate import far_off, fitting_rate
from lorad.spec.model import convert

RATE = Rate(4e-4, "grpo on qwen3")


def rate(model_type: str, width: int, name: str = "grpo", path: str = "m") -> float:
    return fitting_rate(convert({"model": {"path": path}, "algorithm": {"name": name}}), model_type, width).lr


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
    assert rate(model_type, width) == lr


def test_an_unknown_family_takes_the_lower_rate() -> None:
    assert rate("gemma3", 4096) == rate("llama", 4096)
    assert rate("gemma3", 1024) == rate("qwen3", 1024)
    assert "the lower of" in fitting_rate(convert({"model": {"path": "m"}}), "gemma3", 4096).why


def test_models_below_the_formula_take_its_end() -> None:
    assert rate("llama", 64) == rate("llama", 1024) == 8.43e-4
    assert rate("", 0) == rate("llama", 8192)


def test_the_tiny_base_keeps_its_rate() -> None:
    assert rate("qwen3", 128, path="builtin:tiny") == 1e-3


def test_a_rate_ten_times_off_is_doubted() -> None:
    (doubt,) = far_off(3.9e-5, RATE)
    assert doubt.startswith("trainer.lr: 3.9e-05 is 10 times below 0.0004, which fits grpo on qwen3")
    assert "12 times above 0.0004" in far_off(4.8e-3, RATE)[0]
    assert [far_off(lr, RATE) for lr in (4.1e-5, 3.9e-3, 0.0, None)] == [[], [], [], []]
