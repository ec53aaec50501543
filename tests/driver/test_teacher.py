"""A teacher that is another model: held beside the base, asked for log-probabilities, in no checkpoint."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from lorad.adapters.peft import read_peft, write_peft
from lorad.models.directory import linear_shapes, read_config
from lorad.protocol.calls import LoadVersion, Logprobs, Nothing
from lorad.protocol.journal import Reference
from tests.driver.driven import Driven
from tests.kit.fakes.random_adapters import random_adapter
from tests.kit.fakes.teachers import make_teacher
from tests.kit.pool_kit import OPEN, Running, batch, running_pool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, which has learned to sort."""
    place = tmp_path_factory.mktemp("models")
    tuned = ("algorithm=sft", "trainer.steps=12", "trainer.warmup_steps=0", "data.prompts_per_step=32")
    with running_pool(place) as plain:
        run = Driven(plain, place, "tuned", *tuned, "eval.every=0", "checkpoint.every=50")
        assert run.drive().reason == "completed"
    adapter = read_peft(run.run.root / run.facts("version")[-1].data["path"])
    return make_teacher(place / "teacher", adapter)


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """An adapter of the teacher's model, which does not fit the student's."""
    adapter = random_adapter(linear_shapes(read_config(model)), seed=6)
    directory = tmp_path_factory.mktemp("reference")
    write_peft(adapter, directory, str(model))
    return Reference("big@3", adapter.digest(), str(directory))


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    place = tmp_path_factory.mktemp("pool")
    with running_pool(place, deterministic=True, teacher=str(model), teacher_path=str(model)) as pool:
        yield pool


def distill(model: Path, *more: str) -> tuple[str, ...]:
    reward = "reward={name: regex, pattern: never}"
    return f"algorithm={{name: distill, group_size: 2, teacher: {model}}}", reward, *more


@pytest.mark.system
@pytest.mark.parametrize("with_adapter", [False, True])
def test_log_probabilities_equal_its_own_pools(
    running: Running, model: Path, reference: Reference, tmp_path: Path, with_adapter: bool
) -> None:
    held = LoadVersion("r@reference", reference.directory, reference.sha256) if with_adapter else None
    run = f"taught{with_adapter}"
    with running.connect(run) as student:
        student.call("open", replace(OPEN, has_teacher=True, reference=held))
        beside, own = (student.call("logprobs", Logprobs(of, batch().batch)) for of in ("teacher", "base"))
        student.call("close", Nothing())
    with running_pool(tmp_path, model_path=str(model)) as there, there.connect("r") as teacher:
        modules = tuple(sorted(linear_shapes(read_config(model))))
        teacher.call("open", replace(OPEN, modules=modules, reference=held))
        alone = teacher.call("logprobs", Logprobs("reference" if held else "base", batch().batch))
    assert np.array_equal(beside.logprobs, alone.logprobs)
    assert not np.allclose(beside.logprobs, own.logprobs, atol=0.1)


@pytest.mark.system
def test_student_follows_another_model(running: Running, model: Path, tmp_path: Path) -> None:
    more = ("trainer.steps=12", "data.prompts_per_step=16", "eval.every=0")
    run = Driven(running, tmp_path, "student", *distill(model, *more))
    assert run.drive().reason == "completed"
    kl = [record.data["metrics"]["kl"] for record in run.facts("step")]
    assert len(kl) == 12 and np.mean(kl[-3:]) < 0.5 * np.mean(kl[:3])
    assert {record.data["metrics"]["reward"] for record in run.facts("step")} == {0.0}


@pytest.mark.system
def test_kill_changes_nothing_under_a_teacher(
    running: Running, model: Path, reference: Reference, tmp_path: Path
) -> None:
    few = ("trainer.steps=4", "checkpoint.every=2")
    calm, killed = (Driven(running, tmp_path, name, *distill(model, *few)) for name in ("calm", "killed"))
    for run in (calm, killed):
        run.params = replace(run.params, reference=reference)
    assert calm.drive().reason == "completed"
    assert killed.struck(3, signal.SIGKILL) == -signal.SIGKILL
    assert killed.drive().reason == "completed"
    assert killed.outcome() == calm.outcome()
    files = [path for path in killed.run.checkpoints.rglob("*") if path.is_file()]
    student = max(path.stat().st_size for path in files)
    assert student < (model / "model.safetensors").stat().st_size / 2, "the teacher is in no checkpoint"


@pytest.mark.system
def test_other_teacher_ends_a_resume(running: Running, model: Path, tmp_path: Path) -> None:
    run = Driven(running, tmp_path, "moved", *distill(model, "trainer.steps=1"))
    assert run.drive().reason == "completed"
    shutil.copytree(model, tmp_path / "other")
    weights = tmp_path / "other" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    (tmp_path / "pool").mkdir()
    places = {"teacher": str(model), "teacher_path": str(tmp_path / "other")}
    with running_pool(tmp_path / "pool", deterministic=True, **places) as other:
        end = run.drive(pool_socket=other.config.socket, steps=2)
    assert end.reason == "failed" and "algorithm.teacher, are not those of the attempts before" in end.detail


def test_pool_without_teacher_ends_the_run(model: Path, tmp_path: Path) -> None:
    with running_pool(tmp_path, deterministic=True) as plain:
        end = Driven(plain, tmp_path, "lost", *distill(model)).drive()
    assert end.reason == "failed" and "pool p does not hold" in end.detail


@pytest.mark.system
def test_plain_run_is_the_same_beside_a_teacher(running: Running, tmp_path: Path) -> None:
    """A pool with a teacher takes runs without one, and gives them the same bits."""
    (tmp_path / "pool").mkdir()
    beside = Driven(running, tmp_path, "beside", "trainer.steps=2")
    assert beside.drive().reason == "completed"
    with running_pool(tmp_path / "pool", deterministic=True) as plain:
        alone = Driven(plain, tmp_path, "alone", "trainer.steps=2")
        assert alone.drive().reason == "completed"
    assert beside.outcome() == alone.outcome()
