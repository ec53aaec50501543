"""What trainers that adapt experts keep beside the rules of every trainer, on a small random Qwen3-MoE."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from lorad.adapters.adapter import Adapter
from lorad.trainers.base import Policy, Trainer
from tests.conformance.reference import VOCAB, random_batch, reference_logprobs, reference_model
from tests.conformance.trainer_kit import TrainerCase, accumulate, open_trained, targets_for
from tests.models.test_families import make_model


# PEFT says so of what it has made of the experts' pairs, and computes with them all the same
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
class MixtureOfExperts(TrainerCase):
    """Adapters on the attention and on each expert."""

    finite_step = 1e-3  # a larger one sends tokens to other experts

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("moe")
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
        sizes |= {"moe_intermediate_size": 28}  # with 24 a token of these tests is as near to two experts
        make_model(directory, "qwen3_moe", vocab_size=VOCAB, tie_word_embeddings=True, **sizes)
        return directory

    async def test_the_gradient_is_that_of_autograd_through_peft(
        self, trainer: Trainer, base: Path, tmp_path: Path
    ) -> None:
        """PEFT makes one pair of an expert's gate and up, with more numbers that get a gradient. Here it
        comes from that of the merged weights: dA = s B^T dW and dB = s dW A^T.
        """
        expected, found = await gradient_of_merged(trainer, base)
        assert found == pytest.approx(expected, rel=1e-3)

    async def test_unmet_experts_are_those_that_change_nothing(self, trainer: Trainer, base: Path) -> None:
        model, batch = reference_model(base), random_batch(5, groups=1, samples=1)
        unmet = await trainer.unmet_experts(batch)
        assert unmet is not None
        with torch.no_grad():
            before, found = reference_logprobs(model, batch), []
            for layer, expert in itertools.product(range(2), range(4)):
                name = f"model.layers.{layer}.mlp.experts.{expert}"
                weight = weight_in(model, f"{name}.down_proj")
                kept = weight.clone()
                weight.zero_()
                found += [name] * torch.equal(reference_logprobs(model, batch), before)
                weight.copy_(kept)
        assert found == list(unmet) != []
        assert await trainer.unmet_experts(random_batch(5)) == []

    async def test_an_adapter_on_some_experts_leaves_others(self, trainer: Trainer, base: Path) -> None:
        """Whose linears differ from expert to expert, too."""
        parts = ("0.mlp.experts.1.up_proj", "1.mlp.experts.3.down_proj", "1.mlp.experts.3.gate_proj")
        modules = tuple(f"model.layers.{part}" for part in parts)
        await open_trained(trainer, "a", modules=modules)
        adapter, model, batch = await trainer.export("a"), reference_model(base), random_batch(5)
        assert adapter.config.modules == modules
        assert all(b.any() for _, b in merged_into(model, adapter).values())
        with torch.no_grad():
            expected = reference_logprobs(model, batch).numpy()
        assert abs(await trainer.logprobs(Policy("a"), batch) - expected).max() < 1e-4


async def gradient_of_merged(trainer: Trainer, base: Path, **settings: object) -> tuple[float, float]:
    """The norm of the gradient of a trained slot: by autograd through merged weights, and the trainer's."""
    await open_trained(trainer, "a", **settings)
    adapter, model, batch = await trainer.export("a"), reference_model(base), random_batch(5)
    pairs = merged_into(model, adapter)
    await accumulate(trainer, "a", batch)
    weights = targets_for(batch).advantages / batch.completions.size
    logprobs = reference_logprobs(model, batch)
    logprobs.backward(-logprobs.new_tensor(weights))
    squares = 0.0
    for module, (a, b) in pairs.items():
        grad = adapter.config.scale_of(module) * weight_in(model, module, of_gradients=True)
        squares += float((b.T @ grad).square().sum() + (grad @ a.T).square().sum())
    return squares**0.5, (await trainer.optim_step("a", 0.0, 0.0)).grad_norm


def merged_into(model: torch.nn.Module, adapter: Adapter) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Add the adapter to the model's weights; A and B of each module."""
    pairs = {}
    for module in adapter.config.modules:
        a, b = (torch.tensor(adapter.tensors[f"{module}.lora_{half}.weight"]) for half in "AB")
        pairs[module] = a, b
        with torch.no_grad():
            weight_in(model, module).data.add_(adapter.config.scale_of(module) * b @ a)
    return pairs


def weight_in(model: torch.nn.Module, module: str, *, of_gradients: bool = False) -> torch.Tensor:
    """The weight of a linear, or its gradient; transformers holds those of all experts in two tensors."""
    path, _, expert = module.partition(".experts.")
    number, _, linear = expert.partition(".")
    fused = "down_proj" if linear == "down_proj" else "gate_up_proj"
    tensor = model.get_parameter(f"{path}.experts.{fused}" if expert else f"{module}.weight")
    whole = tensor.grad if of_gradients else tensor
    assert whole is not None
    if not expert:
        return whole
    gate, up = whole[int(number)].chunk(2)
    return {"gate_proj": gate, "up_proj": up, "down_proj": whole[int(number)]}[linear]
