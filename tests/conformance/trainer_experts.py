"""What trainers that adapt experts keep beside the rules of every trainer, on a small random Qwen3-MoE."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorad.protocol.batch import Batch
from lorad.trainers.base import Policy, Trainer
from tests.conformance.reference import VOCAB, random_batch, reference_logprobs, reference_model
from tests.conformance.trainer_kit import TrainerCase, accumulate, open_trained, targets_for
from tests.models.test_families import make_model

AFTER_A_PROMPT = Batch.of([(np.arange(24, dtype=np.int32), [np.array([7], np.int32)])])
"""One token: what the others meet in the last layer changes nothing."""


# PEFT says so of what it has made of the experts' pairs, and computes with them all the same
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
class MixtureOfExperts(TrainerCase):
    """Adapters on the attention and on each expert."""

    finite_step = 1e-3  # a larger one sends tokens to other experts

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_mixture(tmp_path_factory.mktemp("moe"))

    async def test_the_gradient_is_that_of_autograd_through_peft(
        self, trainer: Trainer, base: Path, tmp_path: Path
    ) -> None:
        """PEFT makes one pair of an expert's gate and up, with more numbers that get a gradient. Here it
        comes from that of the merged weights: dA = s B^T dW and dB = s dW A^T.
        """
        await open_trained(trainer, "a")
        adapter, model, batch = await trainer.export("a"), reference_model(base), random_batch(5)
        pairs, scale = {}, adapter.config.scale
        for module in adapter.config.modules:
            a, b = (torch.tensor(adapter.tensors[f"{module}.lora_{half}.weight"]) for half in "AB")
            pairs[module] = a, b
            with torch.no_grad():
                weight_in(model, module).data.add_(scale * b @ a)
        await accumulate(trainer, "a", batch)
        weights = targets_for(batch).advantages / batch.completions.size
        logprobs = reference_logprobs(model, batch)
        logprobs.backward(-logprobs.new_tensor(weights))
        squares = 0.0
        for module, (a, b) in pairs.items():
            grad = scale * weight_in(model, module, of_gradients=True)
            squares += float((b.T @ grad).square().sum() + (grad @ a.T).square().sum())
        result = await trainer.optim_step("a", 0.0, 0.0)
        assert result.grad_norm == pytest.approx(squares**0.5, rel=1e-3)

    @pytest.mark.parametrize("batch", [random_batch(5, groups=1, samples=1), AFTER_A_PROMPT])
    async def test_unmet_experts_are_those_that_change_nothing(
        self, trainer: Trainer, base: Path, batch: Batch
    ) -> None:
        model, unmet = reference_model(base), await trainer.unmet_experts(batch)
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

    @pytest.mark.parametrize(
        ("lora_type", "parts"),
        [
            ("canonical_lora", ("1.up_proj", "3.down_proj", "3.gate_proj")),
            ("lora", ("0.gate_proj", "0.up_proj", "3.down_proj", "3.gate_proj", "3.up_proj")),
        ],
    )
    async def test_an_adapter_on_some_experts_leaves_others(
        self, trainer: Trainer, base: Path, lora_type: str, parts: tuple[str, ...]
    ) -> None:
        """Whose linears differ from expert to expert, too."""
        modules = tuple(f"model.layers.{layer}.mlp.experts.{part}" for layer in range(2) for part in parts)
        await open_trained(trainer, "a", modules=modules, lora_type=lora_type)
        adapter, model, batch = await trainer.export("a"), reference_model(base), random_batch(5)
        assert adapter.config.modules == modules
        with torch.no_grad():
            for module in modules:
                a, b = (torch.tensor(adapter.tensors[f"{module}.lora_{half}.weight"]) for half in "AB")
                assert b.any()
                weight_in(model, module).add_(adapter.config.scale * b @ a)
            expected = reference_logprobs(model, batch).numpy()
        assert abs(await trainer.logprobs(Policy("a"), batch) - expected).max() < 1e-4

    async def test_dropout_acts_on_experts(self, trainer: Trainer) -> None:
        modules = tuple(name for name in sorted(trainer.modules()) if ".experts." in name)
        await open_trained(trainer, "a", dropout=0.5, modules=modules)
        batch = random_batch(5)
        likely = await trainer.logprobs(Policy("a"), batch)
        assert self.same(trainer, await trainer.logprobs(Policy("a"), batch), likely)
        first, second = [(await accumulate(trainer, "a", batch, old_logprobs=likely)).ratio for _ in range(2)]
        assert first != second


def write_mixture(directory: Path) -> Path:
    """Two layers of four experts, with random weights."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
    sizes |= {"moe_intermediate_size": 28}  # with 24 a token of these tests is as near to two experts
    make_model(directory, "qwen3_moe", vocab_size=VOCAB, tie_word_embeddings=True, **sizes)
    return directory


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
