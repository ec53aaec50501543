"""Megatron and FSDP over one and two ranks keep the rules of every trainer."""

import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lorad.errors import SpecError
from lorad.protocol.batch import VALUE_LOSS
from lorad.trainers.base import Trainer
from tests.conformance.reference import VOCAB, with_biases, write_random_model
from tests.conformance.trainer_checkpoints import Checkpoints
from tests.conformance.trainer_critics import Critics
from tests.conformance.trainer_dora import Dora
from tests.conformance.trainer_expert_ranks import ExpertRanks
from tests.conformance.trainer_experts import Glm4Moe, Mixtral, MixtureOfExperts, Olmoe, Qwen2Moe
from tests.conformance.trainer_gradients import Gradients, Steps
from tests.conformance.trainer_kit import MakeTrainer, TrainerCase, spec_for
from tests.conformance.trainer_losses import Losses
from tests.conformance.trainer_many import Many
from tests.conformance.trainer_masks import Masks, Ratios
from tests.conformance.trainer_numbers import Numbers
from tests.conformance.trainer_routes import ReplayedRoutes
from tests.conformance.trainer_slots import Slots
from tests.conformance.trainer_suite import PolicySuite, TrainerSuite
from tests.models.test_families import make_model
from tests.tinker.trainer_labels import Labels
from tests.trainers.real.lent import Lender
from tests.trainers.real.start import VARIABLE, python_of, started


class Ranks(TrainerCase):
    """backend, sizes: what is started; model: of `FAMILIES`,
    another than the suite's own when it is given.
    """

    backend: ClassVar[str]
    sizes: ClassVar[dict[str, Any]]

    @classmethod
    def started(cls, base: Path, work: Path) -> Coroutine[Any, Any, Trainer]:
        return started(cls.backend, base, work, **cls.sizes)

    @pytest.fixture(scope="class")
    @classmethod
    def lender(cls, base: Path) -> Iterator[Lender]:
        if python_of(cls.backend) is None:
            pytest.skip(f"{VARIABLE} names no interpreter: `make test-backends` installs Megatron")
        works: list[Path] = []

        def start() -> Coroutine[Any, Any, Trainer]:
            works.append(Path(tempfile.mkdtemp(prefix=f"lr-{cls.backend}-")))
            return cls.started(base, works[-1])

        lender = Lender(start)
        try:
            yield lender
        finally:
            lender.close()
            for work in works:
                shutil.rmtree(work, ignore_errors=True)

    @pytest.fixture
    def make_trainer(self, lender: Lender) -> Iterator[MakeTrainer]:
        async def make() -> Trainer:
            return lender.lend()

        yield make
        lender.take_back()


@pytest.mark.long
class TestFsdpOneRank(Ranks, TrainerSuite):
    backend, sizes = "fsdp", {}


class TestFsdpTwoRanks(Ranks, TrainerSuite):
    """Of the golden cases one for each kind of a loss, its ratios and its KL; the builtin trainer has all."""

    backend, sizes = "fsdp", {"dp": 2}
    policies = (
        *("grpo", "grpo_kl_k3", "dual_clip", "gspo", "gmpo", "cispo", "topr", "sapo", "dppo_tv"),
        *("prime_default", "dro", "dft", "dapo_sequence_mask", "vespo"),
    )


@pytest.mark.long
class TestDoraOnOneRank(Ranks, Dora):
    backend, sizes = "fsdp", {}


class TestDoraOnTwoRanks(Ranks, Dora):
    backend, sizes = "fsdp", {"dp": 2}

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("biased")
        write_random_model(directory, tie_word_embeddings=False, attention_bias=True)
        with_biases(directory)
        return directory


@pytest.mark.long
class TestDoraContextParallel(Ranks, Dora):
    backend, sizes = "fsdp", {"cp": 2}


class TestFsdpContextParallel(Ranks, Numbers, Gradients, Masks, Ratios):
    """What reads sequences, of which each rank has a part."""

    backend, sizes = "fsdp", {"cp": 2}


@pytest.mark.long
class TestLossesContextParallel(Ranks, Steps, Losses, Labels, Critics):
    """Losses are given the log-probabilities of whole sequences, as on data-parallel ranks."""

    backend, sizes = "fsdp", {"cp": 2}


@pytest.mark.long
class TestSlotsContextParallel(Ranks, Slots, Many, Checkpoints):
    """What slots hold lies on these ranks as on data-parallel ones: `TestFsdpTwoRanks`."""

    backend, sizes = "fsdp", {"cp": 2}


@pytest.mark.long
class TestFsdpContextAndDataParallel(Ranks, TrainerSuite):
    backend, sizes = "fsdp", {"cp": 2, "dp": 2}


@pytest.mark.long
class TestMegatronOneRank(Ranks, TrainerSuite):
    backend, sizes = "megatron", {}


class TestMegatronTensorParallel(Ranks, Numbers, Gradients, Masks):
    """What Megatron computes: numbers, gradients and recomputed activations."""

    backend, sizes = "megatron", {"tp": 2}


@pytest.mark.long
class TestLossesTensorParallel(Ranks, Steps, Losses, Labels, Ratios):
    """Losses are given log-probabilities of tokens, and steps gradients, as on ranks of FSDP."""

    backend, sizes = "megatron", {"tp": 2}


@pytest.mark.long
class TestSlotsTensorParallel(Ranks, Slots, Many, Checkpoints):
    """Slots are those of every trainer with ranks: `TestFsdpTwoRanks`; in CI a checkpoint moves to these
    ranks and away in test_gates.
    """

    backend, sizes = "megatron", {"tp": 2}


@pytest.mark.long
class TestCriticsTensorParallel(Ranks, Critics):
    """A critic's head lies beside the model on each rank, as on those of FSDP."""

    backend, sizes = "megatron", {"tp": 2}


@pytest.mark.long
class TestMegatronDataParallel(Ranks, TrainerSuite):
    backend, sizes = "megatron", {"dp": 2}


@pytest.mark.long
class TestMegatronPipeline(Ranks, PolicySuite):
    backend, sizes = "megatron", {"pp": 2}

    async def test_a_critic_is_refused(self, trainer: Trainer) -> None:
        assert VALUE_LOSS not in trainer.capabilities().losses
        with pytest.raises(SpecError, match=r"trainer\.pp"):
            await trainer.open("c", spec_for(trainer, critic=True))
        assert not trainer.slots()


class OtherFamily(Ranks, Numbers):
    family: ClassVar[str]

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp(cls.family)
        sizes: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "max_position_embeddings": 256,
        }
        make_model(directory, cls.family, tie_word_embeddings=cls.family == "qwen2", **sizes)
        return directory


class TestQwen2OnMegatron(OtherFamily):
    backend, sizes, family = "megatron", {"tp": 2}, "qwen2"


@pytest.mark.long
class TestLlamaOnMegatron(OtherFamily):
    backend, sizes, family = "megatron", {"tp": 2}, "llama"


@pytest.mark.long
class TestQwen2OnFsdp(OtherFamily):
    backend, sizes, family = "fsdp", {"dp": 2}, "qwen2"


@pytest.mark.long
class TestQwen2ContextParallel(OtherFamily):
    backend, sizes, family = "fsdp", {"cp": 2}, "qwen2"


@pytest.mark.long
class TestLlamaOnFsdp(OtherFamily):
    backend, sizes, family = "fsdp", {"dp": 2}, "llama"


class Mixture(MixtureOfExperts, ExpertRanks, ReplayedRoutes, Ranks, Numbers):
    """What experts change: numbers, gradients, also those of small micro-batches with recomputed layers, and
    the checkpoints of their own adapters. The other rules know nothing of the model behind a head, and CI
    tries them on dense ones.
    """


class WholeMixture(Mixture, TrainerSuite):
    """Every rule."""


@pytest.mark.long
class TestMixtureOnMegatron(WholeMixture):
    backend, sizes = "megatron", {}


class TestMixtureOnMegatronExpertParallel(Mixture):
    backend, sizes = "megatron", {"dp": 2, "ep": 2}


@pytest.mark.long
class TestEveryRuleExpertParallel(WholeMixture):
    """Ranks share the state of slots otherwise than on dense models: experts' among fewer."""

    backend, sizes = "megatron", {"dp": 2, "ep": 2}


@pytest.mark.long
class TestMixtureOnMegatronTensorParallel(MixtureOfExperts, ReplayedRoutes, Ranks):
    backend, sizes = "megatron", {"tp": 2}


@pytest.mark.long
class TestMixtureOnMegatronPipeline(MixtureOfExperts, ReplayedRoutes, Ranks):
    backend, sizes = "megatron", {"pp": 2}


@pytest.mark.long
class TestMixtureOnOneRank(WholeMixture):
    backend, sizes = "fsdp", {}


class TestMixtureOnTwoRanks(Mixture):
    backend, sizes = "fsdp", {"dp": 2}


@pytest.mark.long
class TestEveryRuleOnTwoRanks(WholeMixture):
    backend, sizes = "fsdp", {"dp": 2}


@pytest.mark.long
class TestMixtureContextParallel(WholeMixture):
    backend, sizes = "fsdp", {"cp": 2}


class TestMixtralOnTwoRanks(Mixtral, Ranks):
    backend, sizes = "fsdp", {"dp": 2}


class TestGlm4MoeOnTwoRanks(Glm4Moe, Ranks):
    backend, sizes = "fsdp", {"dp": 2}


@pytest.mark.long
class TestQwen2MoeOnTwoRanks(Qwen2Moe, Ranks):
    backend, sizes = "fsdp", {"dp": 2}


@pytest.mark.long
class TestOlmoeOnTwoRanks(Olmoe, Ranks):
    backend, sizes = "fsdp", {"dp": 2}


@pytest.mark.parametrize(
    ("family", "sizes", "says"),
    [
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            "sliding_window",
        ),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "head_dim": 8}, "more from token to token"),
    ],
)
async def test_models_are_not_cut_wrongly(
    tmp_path: Path, family: str, sizes: dict[str, Any], says: str
) -> None:
    make_model(tmp_path / "base", family, **sizes)
    (tmp_path / "work").mkdir()
    with pytest.raises(SpecError, match=says) as refused:
        await started("fsdp", tmp_path / "base", tmp_path / "work", cp=2)
    assert refused.value.key == "trainer.cp" and refused.value.hint


def test_a_class_of_ranks_has_one_worker(request: pytest.FixtureRequest) -> None:
    """Each worker would start its ranks else."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("all tests run in one process, or not by --dist loadgroup")
    assert request.node.nodeid.endswith("@tests/trainers/real/test_conformance.py")
