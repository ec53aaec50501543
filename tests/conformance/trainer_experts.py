"""What trainers that adapt experts keep beside the rules of every trainer, on small random mixtures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorad.adapters.targets import experts_of
from lorad.protocol.batch import Batch
from lorad.trainers.base import Policy, Trainer
from tests.conformance.expert_weights import gradient_norm, merge, weight_in
from tests.conformance.reference import VOCAB, random_batch, reference_logprobs, reference_model
from tests.conformance.trainer_kit import TrainerCase, accumulate, open_trained, targets_for
from tests.models.test_families import make_model

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 28},  # with 24 a token of these tests is as near to two experts
    "qwen2_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
}
AFTER_A_PROMPT = Batch.of([(np.arange(24, dtype=np.int32), [np.array([7], np.int32)])])
"""One token: what the others meet in the last layer changes nothing."""


def write_mixture(directory: Path, family: str = "qwen3_moe", **options: object) -> Path:
    """A few layers of experts, with random weights."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
    sizes |= SIZES.get(family, {}) | options
    make_model(directory, family, vocab_size=VOCAB, tie_word_embeddings=True, **sizes)
    return directory


class _Experts(TrainerCase):
    """Adapters on all linears of a mixture. family: by transformers' name."""

    family = "qwen3_moe"

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_mixture(tmp_path_factory.mktemp("moe"), cls.family)

    async def test_the_gradient_is_that_of_autograd_through_peft(
        self, trainer: Trainer, base: Path, tmp_path: Path
    ) -> None:
        """PEFT makes one pair of an expert's gate and up, with more numbers that get a gradient. Here it
        comes from that of the merged weights: dA = s B^T dW and dB = s dW A^T.
        """
        expected, found = await gradient_of_merged(trainer, base)
        assert found == pytest.approx(expected, rel=1e-3)

    @pytest.mark.parametrize("batch", [random_batch(5, groups=1, samples=1), AFTER_A_PROMPT])
    async def test_unmet_experts_are_those_that_change_nothing(
        self, trainer: Trainer, base: Path, batch: Batch
    ) -> None:
        model, unmet = reference_model(base), await trainer.unmet_experts(batch)
        assert unmet is not None
        names = {module.rpartition(".")[0] for module in trainer.modules() if experts_of(module)}
        with torch.no_grad():
            before, found = reference_logprobs(model, batch), []
            for name in sorted(
                names, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()]
            ):
                weight = weight_in(model, f"{name}.down_proj")
                kept = weight.clone()
                weight.zero_()
                found += [name] * torch.equal(reference_logprobs(model, batch), before)
                weight.copy_(kept)
        assert found == list(unmet) != []
        assert await trainer.unmet_experts(random_batch(5)) == []


# PEFT says so of what it has made of the experts' pairs, and computes with them all the same
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
class MixtureOfExperts(_Experts):
    finite_step = 1e-3  # a larger one sends tokens to other experts

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
        assert all(b.any() for _, b in merge(model, adapter).values())
        with torch.no_grad():
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


class Qwen2Moe(_Experts):
    """An MLP beside the experts, with a gate."""

    family = "qwen2_moe"


class Olmoe(_Experts):
    """Norms over all heads of q and of k."""

    family = "olmoe"


class Mixtral(_Experts):
    """Names of its own for an expert's linears."""

    family = "mixtral"


class Glm4Moe(_Experts):
    """A layer without experts, an MLP beside them, groups of experts, and heads that are rotated partly."""

    family = "glm4_moe"


class GptOss(_Experts):
    """Sinks, windows that are shorter than prompts, biases, and a clamped activation."""

    family = "gpt_oss"


async def gradient_of_merged(trainer: Trainer, base: Path, **settings: object) -> tuple[float, float]:
    """The norm of the gradient of a trained slot: by autograd through merged weights, and the trainer's."""
    await open_trained(trainer, "a", **settings)
    adapter, model, batch = await trainer.export("a"), reference_model(base), random_batch(5)
    pairs = merge(model, adapter)
    await accumulate(trainer, "a", batch)
    weights = targets_for(batch).advantages / batch.completions.size
    logprobs = reference_logprobs(model, batch)
    logprobs.backward(-logprobs.new_tensor(weights))
    expected = gradient_norm(model, pairs, adapter.config)
    return expected, (await trainer.optim_step("a", 0.0, 0.0)).grad_norm
