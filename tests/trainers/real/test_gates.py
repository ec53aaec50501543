"""What must hold between trainers and topologies: the same numbers, and checkpoints that move."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from lorad.errors import AdapterRefused
from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.protocol.batch import LossStats
from lorad.protocol.calls import StepResult
from lorad.trainers.base import Trainer
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.conformance.reference import random_batch, write_random_model
from tests.conformance.trainer_experts import write_mixture
from tests.conformance.trainer_kit import PLAIN, accumulate, flat, open_trained, saved, spec_for, train
from tests.trainers.real.lent import Lender
from tests.trainers.real.start import VARIABLE, python_of, started

LONG = pytest.mark.long
Lend = Callable[..., Trainer]
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "fsdp": {"backend": "fsdp"},
    "fsdp-dp2": {"backend": "fsdp", "dp": 2},
    "megatron": {"backend": "megatron"},
    "megatron-tp2": {"backend": "megatron", "tp": 2},
    "megatron-dp2": {"backend": "megatron", "dp": 2},
    "megatron-pp2": {"backend": "megatron", "pp": 2},
    "moe-fsdp-dp2": {"backend": "fsdp", "dp": 2},
    "moe-megatron": {"backend": "megatron"},
    "moe-megatron-ep2": {"backend": "megatron", "dp": 2, "ep": 2},
    "moe-megatron-tp2-dp2-ep2": {"backend": "megatron", "tp": 2, "dp": 2, "ep": 2},
    "moe-megatron-pp2-ep2": {"backend": "megatron", "pp": 2, "dp": 2, "ep": 2},
}
"""moe: on a mixture of experts, with adapters on each of them."""
# moe-megatron-ep2 has data-parallel ranks of Megatron
NOT_IN_CI = {
    "fsdp", "megatron", "megatron-tp2", "megatron-dp2", "megatron-pp2",
    "moe-fsdp-dp2", "moe-megatron", "moe-megatron-tp2-dp2-ep2", "moe-megatron-pp2-ep2",
}  # fmt: skip
EACH = [pytest.param(name, marks=[LONG] if name in NOT_IN_CI else []) for name in TOPOLOGIES]


def builtin_of(topology: str) -> str:
    return "moe-builtin" if topology.startswith("moe-") else "builtin"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the name of the builtin trainer on them."""
    return {
        "builtin": write_random_model(tmp_path_factory.mktemp("base")),
        "moe-builtin": write_mixture(tmp_path_factory.mktemp("moe")),
    }


@pytest.fixture(scope="module")
def lenders() -> Iterator[dict[str, Lender]]:
    """A lender for each topology that was asked for."""
    found: dict[str, Lender] = {}
    yield found
    for lender in found.values():
        lender.close()


@pytest.fixture
def lend(lenders: dict[str, Lender], bases: dict[str, Path]) -> Iterator[Lend]:
    """A trainer of a topology, or the builtin one; slots are closed at the end."""
    computes: list[Compute] = []
    works: list[Path] = []

    def start(topology: str, **more: Any) -> Any:
        works.append(Path(tempfile.mkdtemp(prefix=f"lr-{topology}-")))
        settings, base = {**TOPOLOGIES[topology], **more}, bases[builtin_of(topology)]
        return started(settings.pop("backend"), base, works[-1], **settings)

    def lend(topology: str, **more: Any) -> Trainer:
        if topology in bases:
            computes.append(Compute())
            base = bases[topology]
            return BuiltinTrainer(
                load_base(base, torch.float32, torch.device("cpu")), computes[-1], str(base)
            )
        if python_of(TOPOLOGIES[topology]["backend"]) is None:
            pytest.skip(f"{VARIABLE} names no interpreter: `make test-backends` installs Megatron")
        key = f"{topology} {more}"
        if key not in lenders:
            lenders[key] = Lender(partial(start, topology, **more))
        return lenders[key].lend()

    yield lend
    for lender in lenders.values():
        lender.take_back()
    for compute in computes:
        compute.close()


def numbers_of(steps: list[tuple[LossStats, StepResult]]) -> list[tuple[float, float]]:
    """Return what depends on the policy in each step: on fresh samples the loss does not."""
    return [(stats.entropy / stats.tokens, stats.sampler_difference / stats.tokens) for stats, _ in steps]


@pytest.mark.parametrize("topology", EACH)
async def test_statistics_agree_with_the_builtin_trainer(lend: Lend, topology: str) -> None:
    steps = []
    for name in (builtin_of(topology), topology):
        trainer = lend(name)
        await trainer.open("a", spec_for(trainer, seed=3))
        steps.append(await train(trainer, "a", range(6)))
    np.testing.assert_allclose(numbers_of(steps[0]), numbers_of(steps[1]), atol=1e-4)
    np.testing.assert_allclose(
        [r.grad_norm for _, r in steps[0]], [r.grad_norm for _, r in steps[1]], rtol=1e-3
    )


@pytest.mark.parametrize("topology", EACH)
async def test_gradients_are_those_of_the_builtin_trainer(lend: Lend, topology: str, tmp_path: Path) -> None:
    builtin = lend(builtin_of(topology))
    await open_trained(builtin, "start")
    start, gradients = await saved(builtin, "start", tmp_path / "start"), []
    for trainer in (builtin, lend(topology)):
        await trainer.open("plain", spec_for(trainer, source=start, optimizer=PLAIN))
        before = flat(await trainer.export("plain"))
        await accumulate(trainer, "plain", random_batch(5))
        await trainer.optim_step("plain", PLAIN.eps, 0.0)
        gradients.append(before - flat(await trainer.export("plain")))
    assert np.abs(gradients[0]).max() > 1e-3
    np.testing.assert_allclose(gradients[1], gradients[0], atol=1e-5)


@pytest.mark.parametrize("topology", ["fsdp-dp2", pytest.param("megatron-tp2", marks=LONG)])
async def test_bfloat16_keeps_adapters_at_rate_zero(lend: Lend, topology: str, tmp_path: Path) -> None:
    trainer = lend(topology, dtype="bfloat16")
    await open_trained(trainer, "a")
    digest, directory = (await trainer.export("a")).digest(), await saved(trainer, "a", tmp_path / "a")
    await trainer.open("b", spec_for(trainer, seed=9))
    await trainer.load("b", directory)
    await train(trainer, "b", range(1), lr=0.0)
    assert (await trainer.export("b")).digest() == digest


@LONG
async def test_dropout_on_copied_tokens_is_refused(lend: Lend) -> None:
    trainer = lend("moe-megatron-tp2-dp2-ep2")
    with pytest.raises(AdapterRefused, match=r"copies of a token that the ranks of"):
        await trainer.open("a", spec_for(trainer, dropout=0.1))
    attention = tuple(name for name in sorted(trainer.modules()) if ".experts." not in name)
    await trainer.open("a", spec_for(trainer, dropout=0.1, modules=attention))


JOURNEYS = [
    pytest.param(("builtin", "megatron-tp2", "fsdp-dp2", "builtin"), id="one trainer after another"),
    pytest.param(("megatron-tp2", "megatron-pp2", "megatron-dp2", "megatron-tp2"), id="megatron", marks=LONG),
    pytest.param(("fsdp-dp2", "fsdp", "builtin", "fsdp-dp2"), id="fsdp", marks=LONG),
    pytest.param(
        ("moe-builtin", "moe-megatron-ep2", "moe-fsdp-dp2", "moe-builtin"), id="experts", marks=LONG
    ),
    pytest.param(
        ("moe-megatron-ep2", "moe-megatron", "moe-megatron-pp2-ep2", "moe-megatron-ep2"),
        id="experts on megatron",
        marks=LONG,
    ),
]


@pytest.mark.parametrize("journey", JOURNEYS)
async def test_a_checkpoint_moves_between_trainers(
    lend: Lend, journey: tuple[str, ...], tmp_path: Path
) -> None:
    """At each hop the state is the same bit for bit, and the next losses equal those without the hop."""
    here, name = lend(journey[0]), "run"
    await here.open(name, spec_for(here, seed=3))
    await train(here, name, range(3))
    for hop, place in enumerate(journey[1:]):
        left = await saved(here, name, tmp_path / f"{hop} left")
        there, batches = lend(place), range(3 + 3 * hop, 6 + 3 * hop)
        await there.open(f"hop {hop}", spec_for(there, seed=3))
        await there.load(f"hop {hop}", left)
        assert_same_state(left, await saved(there, f"hop {hop}", tmp_path / f"{hop} arrived"))
        stayed, went = await train(here, name, batches), await train(there, f"hop {hop}", batches)
        np.testing.assert_allclose(numbers_of(stayed), numbers_of(went), atol=1e-4)
        here, name = there, f"hop {hop}"


def assert_same_state(left: Path, right: Path) -> None:
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        ours, theirs = load_file(left / file), load_file(right / file)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []
