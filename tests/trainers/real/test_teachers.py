"""A teacher that is another model beside a trainer of ranks: the pool's own process holds it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec.structs import replace

from lorad.adapters.peft import write_peft
from lorad.models.directory import linear_shapes, read_config
from lorad.protocol.calls import LoadVersion, Logprobs
from tests.driver.driven import Driven
from tests.kit.fakes.random_adapters import random_adapter
from tests.kit.fakes.teachers import make_teacher
from tests.kit.pool_kit import OPEN, SHAPES, Running, batch, running_pool
from tests.kit.world import World
from tests.trainers.real.start import VARIABLE, python_of, setup_of

WORKER = "lorad.trainers.ranks.worker"
RANKS: dict[str, tuple[str, dict[str, int]]] = {
    "fsdp-1": ("fsdp", {}),
    "fsdp-2": ("fsdp", {"dp": 2}),
    "megatron-2": ("megatron", {"tp": 2}),
}
# the teacher is in the pool, not in the ranks: CI takes one kind of them
EACH = [pytest.param(name, marks=[] if name == "fsdp-2" else pytest.mark.long) for name in RANKS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    return make_teacher(place / "teacher", random_adapter(SHAPES, seed=5, std=0.15))


@pytest.fixture(scope="module", params=EACH)
def running(model: Path, tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Running]:
    backend, sizes = RANKS[request.param]
    if python_of(backend) is None:
        pytest.skip(f"{VARIABLE} names no interpreter: `make test-backends` installs Megatron")
    place = tmp_path_factory.mktemp(request.param)
    ranks = {"trainer": backend, "ranks": setup_of(backend, **sizes), "mode": "resident"}
    with running_pool(place, teacher=str(model), teacher_path=str(model), **ranks) as pool:
        yield pool


def distill(model: Path) -> tuple[str, ...]:
    algorithm = f"algorithm={{name: distill, group_size: 2, teacher: {model}}}"
    return algorithm, "reward={name: regex, pattern: never}", "data.prompts_per_step=16", "eval.every=0"


@pytest.mark.parametrize("with_adapter", [False, True])
def test_log_probabilities_equal_a_builtin_pools(
    running: Running, model: Path, tmp_path: Path, with_adapter: bool
) -> None:
    held, shapes = None, linear_shapes(read_config(model))
    if with_adapter:
        adapter = random_adapter(shapes, seed=6)
        (tmp_path / "adapter").mkdir()
        write_peft(adapter, tmp_path / "adapter", str(model))
        held = LoadVersion("r@reference", str(tmp_path / "adapter"), adapter.digest())
    with running.connect(f"taught{with_adapter}") as student:
        student.call("open", replace(OPEN, has_teacher=True, reference=held))
        beside, own = (student.call("logprobs", Logprobs(of, batch().batch)) for of in ("teacher", "base"))
    (tmp_path / "alone").mkdir()
    with running_pool(tmp_path / "alone", model_path=str(model)) as there, there.connect("r") as teacher:
        teacher.call("open", replace(OPEN, modules=tuple(sorted(shapes)), reference=held))
        alone = teacher.call("logprobs", Logprobs("reference" if held else "base", batch().batch))
    assert np.array_equal(beside.logprobs, alone.logprobs)
    assert not np.allclose(beside.logprobs, own.logprobs, atol=0.1)


def test_student_of_ranks_follows_its_teacher(running: Running, model: Path, tmp_path: Path) -> None:
    run = Driven(running, tmp_path, "student", *distill(model), "trainer.steps=10")
    assert run.drive().reason == "completed"
    kl = [record.data["metrics"]["kl"] for record in run.facts("step")]
    assert len(kl) == 10 and np.mean(kl[-2:]) < 0.8 * np.mean(kl[:2])


@pytest.mark.long
@pytest.mark.parametrize("victim", ["pool", "rank"])
def test_a_resume_continues_exactly(made: World, model: Path, victim: str) -> None:
    spec = made.spec("data: {train: sort}\ntrainer: {backend: fsdp, dp: 2, steps: 8}\ncheckpoint: {every: 2}")
    for name in ("calm", "killed"):
        made.lorad("run", spec, *distill(model), "--name", name, "--detach")
        if name == "killed":
            made.reached(name, 5)
            pool = psutil.Process(made.pid(name, "pool"))
            ranks = [p for p in pool.children(recursive=True) if WORKER in p.cmdline()]
            assert len(ranks) == 2
            os.kill({"pool": pool, "rank": ranks[-1]}[victim].pid, signal.SIGKILL)
            assert made.over(name).reason == "lost"
            made.lorad("resume", name, "--detach")
        made.completed(name)
    assert made.facts("killed") == made.facts("calm")
