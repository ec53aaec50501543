"""Attestation of a mixture of experts: every fault in the adapters on its experts is found."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from lorad.errors import AttestationFailed
from lorad.models.directory import linear_shapes, read_config, resolve
from lorad.protocol.calls import Attestation
from lorad.protocol.connection import Connection
from tests.kit.pool_kit import OPEN, learn, publish, running_pool

MOE = resolve("builtin:tiny-moe")
OPEN_MOE = replace(OPEN, modules=tuple(sorted(linear_shapes(read_config(MOE)))), amplified_every=1)
FAULTS = ("DropsExpert", "PermutesExperts", "SwapsGateAndUp", "ReordersB")
MODES = ("fused", "resident")  # compared directly, and also by name and amplified


@contextmanager
def opened(directory: Path, engine: str, mode: str) -> Iterator[Connection]:
    """A run on the experts, with an open slot, in a pool of its own."""
    base = {"model": "builtin:tiny-moe", "model_path": str(MOE), "mode": mode}
    fault = f"tests.kit.fakes.faulty_engines:{engine}"
    with running_pool(directory, **base, engine_class=fault) as running, running.connect("sorter") as run:
        run.call("open", OPEN_MOE)
        yield run


def published(run: Connection, directory: Path, number: int, lr: float) -> Attestation:
    attestation = publish(run, directory, number).attestation
    learn(run, seed=number, lr=lr)
    return attestation


# one expert of twelve after steps of 1e-5 is 0.3 % of the change: too little for the direct comparison alone
BELOW = ("DropsExpert", "fused", 1e-5)
CASES = [
    (fault, mode, lr)
    for fault in FAULTS
    for mode in MODES
    for lr in (1e-3, 1e-5)
    if (fault, mode, lr) != BELOW
]


@pytest.mark.parametrize(("fault", "mode", "lr"), CASES)
def test_faults_on_experts_are_found(fault: str, mode: str, lr: float, tmp_path: Path) -> None:
    with opened(tmp_path, fault, mode) as run:
        verdicts = [published(run, tmp_path, number, lr).verdict for number in range(2)]
        assert verdicts == ["passed", "passed"]
        with pytest.raises(AttestationFailed, match=r"sorter@2 failed its attestation: .*other tensors"):
            publish(run, tmp_path, 2)


@pytest.mark.parametrize("lr", [1e-3, 1e-5])
@pytest.mark.parametrize("mode", MODES)
def test_clean_versions_of_experts_pass(mode: str, lr: float, tmp_path: Path) -> None:
    with opened(tmp_path, "Clean", mode) as run:
        found = [published(run, tmp_path, number, lr) for number in range(8)]
    assert {attestation.verdict for attestation in found} == {"passed"}, found
