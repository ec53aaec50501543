"""The pool as its runs see it."""

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.adapters.directory import commit, read_manifest, verify
from lorad.adapters.peft import WEIGHTS
from lorad.errors import AdapterRefused, AttestationFailed, Conflict, IntegrityError, LoradError, StorageError
from lorad.pool.files import VersionFiles
from lorad.pool.work import tokens_of
from lorad.protocol.batch import Sampling
from lorad.protocol.calls import Evict, Generate, Nothing, Open, OptimStep, Save, SlotClosed
from lorad.protocol.connection import Connection
from lorad.protocol.status import PoolInfo
from tests.kit.pool_kit import (
    MODULES,
    OPEN,
    Running,
    batch,
    generate,
    learn,
    prompts,
    publish,
    running_pool,
    texts,
    until,
)

pytest_plugins = ["tests.kit.pool_fixtures"]


def directory_of(root: Path, run: Connection, number: int) -> Path:
    return root / run.run / "versions" / f"{number:06d}"


def checkpoint(connection: Connection, final: Path) -> Path:
    temporary = final.with_name(f".tmp-{final.name}")
    temporary.mkdir(parents=True)
    connection.call("save", Save(str(temporary)))
    commit(temporary, final)
    return final


def test_a_published_version_is_attested_served_and_written(run: Connection, tmp_path: Path) -> None:
    publish(run, tmp_path, 0)
    learn(run)
    published = publish(run, tmp_path, 1)
    assert (
        published.attestation.verdict == "passed" and published.seconds > 0 and published.attest_seconds > 0
    )
    assert {chunk.version for chunk in generate(run, published.version)} == {f"{run.run}@1"}
    checkpoint(run, tmp_path / "checkpoint")
    for number in (0, 1):
        verify(directory_of(tmp_path, run, number))
    weights = directory_of(tmp_path, run, 1) / WEIGHTS
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == published.sha256
    assert read_manifest(weights.parent).facts["version"] == 1


def test_current_and_previous_version_stay_loaded(run: Connection, tmp_path: Path) -> None:
    for number in range(4):
        publish(run, tmp_path, number)
    mine = [f"{run.run}@2", f"{run.run}@3"]
    until(lambda: [v for v in run.call("status", Nothing()).loaded if v.startswith(run.run)] == mine)
    with pytest.raises(Conflict, match="not an attested version"):
        generate(run, f"{run.run}@1")


def test_run_samples_only_its_versions_and_base(run: Connection, running: Running, tmp_path: Path) -> None:
    assert texts(generate(run, "base"))
    with running.connect("somebody-else") as other:
        other.call("open", OPEN)
        publish(other, tmp_path, 0)
        with pytest.raises(Conflict, match="not an attested version"):
            generate(run, "somebody-else@0")


def test_tokens_of_another_version_end_the_stream(tmp_path: Path) -> None:
    engine = "tests.kit.fakes.faulty_engines:Misnames"
    with running_pool(tmp_path, engine_class=engine) as faulty, faulty.connect("sorter") as connection:
        connection.call("open", OPEN)
        publish(connection, tmp_path, 0)
        with pytest.raises(AttestationFailed, match="tokens of other@7 when it was asked for sorter@0"):
            generate(connection, "sorter@0")


def test_an_adapter_that_is_not_finite_changes_nothing(run: Connection, tmp_path: Path) -> None:
    publish(run, tmp_path, 0)
    before = texts(generate(run, f"{run.run}@0"))
    run.call("forward_backward", batch())
    run.call("optim_step", OptimStep(lr=float("inf"), max_grad_norm=0.0))
    with pytest.raises(AdapterRefused, match=rf"{run.run}@7 at step 7: .* NaN or infinite"):
        publish(run, tmp_path, 7)
    assert texts(generate(run, f"{run.run}@0")) == before
    loaded = run.call("status", Nothing()).loaded
    assert f"{run.run}@0" in loaded and f"{run.run}@7" not in loaded


@pytest.mark.system
def test_thousands_of_prompts_travel_in_one_call(run: Connection) -> None:
    many = Generate("base", prompts(3000, samples=1), Sampling(max_new_tokens=1))
    *items, done = run.stream("generate", many)
    assert (
        done.samples == 3000
        and len({chunk.prompt for item in items for chunk in item.split(many.prompts)}) == 3000
    )


def test_version_numbers_only_grow(run: Connection, tmp_path: Path) -> None:
    publish(run, tmp_path, 4)
    with pytest.raises(Conflict, match="cannot follow"):
        publish(run, tmp_path, 4)


def test_later_attempt_can_publish_a_number_again(run: Connection, running: Running, tmp_path: Path) -> None:
    publish(run, tmp_path / "lost", 0)
    with running.connect(run.run, attempt=2) as later:
        later.call("open", OPEN)
        learn(later)
        published = publish(later, tmp_path, 0)
        assert {chunk.version for chunk in generate(later, published.version)} == {f"{run.run}@0"}


def test_unwritten_version_fails_the_next_calls(run: Connection, tmp_path: Path) -> None:
    (tmp_path / run.run).write_text("a file where a directory is wanted")
    publish(run, tmp_path, 0)
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(StorageError, match="could not be written"):
        run.call("save", Save(str(tmp_path / "checkpoint")))
    with pytest.raises(StorageError):
        publish(run, tmp_path, 1)
    with pytest.raises(StorageError):
        run.call("close", Nothing())
    assert run.run not in [tenant.run for tenant in run.call("status", Nothing()).tenants]


def test_closing_waits_for_versions_being_written(tmp_path: Path) -> None:
    tensors = {
        f"{MODULES[0]}.lora_A.weight": np.zeros((4, 128), np.float32),
        f"{MODULES[0]}.lora_B.weight": np.zeros((384, 4), np.float32),
    }
    files = VersionFiles("builtin:tiny")
    for number in range(20):
        files.write(
            "sorter", Adapter(AdapterConfig(4, 8.0, MODULES[:1]), tensors), tmp_path / str(number), {}
        )
    files.close()
    for number in range(20):
        verify(tmp_path / str(number))


def test_run_outlives_an_unwritable_checkpoint(run: Connection, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="could not be written"):
        run.call("save", Save(str(tmp_path / "nowhere")))
    assert learn(run).applied


def test_resume_continues_bit_for_bit(run: Connection, running: Running, tmp_path: Path) -> None:
    learn(run, seed=0)
    saved = checkpoint(run, tmp_path / "checkpoint")
    learn(run, seed=1)
    expected = publish(run, tmp_path, 0).sha256
    with running.connect(run.run, attempt=2) as resumed:
        resumed.call("open", msgspec.structs.replace(OPEN, resume_from=str(saved)))
        learn(resumed, seed=1)
        assert publish(resumed, tmp_path, 1).sha256 == expected


def test_damaged_checkpoint_leaves_no_slot(run: Connection, running: Running, tmp_path: Path) -> None:
    saved = checkpoint(run, tmp_path / "checkpoint")
    moments = (saved / "optimizer.safetensors").read_bytes()
    (saved / "optimizer.safetensors").write_bytes(moments[:-1] + b"!")  # still a file that could be loaded
    with running.connect(run.run, attempt=2) as resumed:
        with pytest.raises(IntegrityError, match=r"optimizer\.safetensors: changed bytes"):
            resumed.call("open", msgspec.structs.replace(OPEN, resume_from=str(saved)))
        with pytest.raises(Conflict, match="no open slot"):
            resumed.call("optim_step", OptimStep(1e-3, 0.0))


def test_a_run_can_start_from_a_peft_directory(run: Connection, running: Running, tmp_path: Path) -> None:
    learn(run)
    first = publish(run, tmp_path, 0)
    run.call("close", Nothing())
    with running.connect("continued") as other:
        other.call("open", msgspec.structs.replace(OPEN, source=str(directory_of(tmp_path, run, 0))))
        assert publish(other, tmp_path, 0).sha256 == first.sha256


def test_modules_that_the_base_has_not_are_refused(running: Running) -> None:
    with running.connect("wrong-modules") as connection, pytest.raises(AdapterRefused, match="no linear"):
        connection.call("open", Open(modules=("model.layers.99.mlp.up_proj",), rank=4, alpha=8.0))


def test_evicted_run_leaves_nothing(running: Running, tmp_path: Path) -> None:
    with running.connect("evicted") as first:
        first.call("open", OPEN)
        (tmp_path / "evicted").write_text("in the way of its versions")
        publish(first, tmp_path, 0)
        first.call("forward_backward", batch())
    with running.connect() as daemon, running.connect("evicted", attempt=2) as second:
        daemon.call("evict", Evict("evicted", 1))
        assert "evicted" not in running.pool.files._pending
        second.call("open", OPEN)
        assert learn(second).tokens == tokens_of(batch().batch)
        second.call("close", Nothing())


def test_close_confirms_the_base_is_unchanged(run: Connection, tmp_path: Path) -> None:
    info: PoolInfo = run.call("hello", Nothing())
    learn(run)
    publish(run, tmp_path, 0)
    closed: SlotClosed = run.call("close", Nothing())
    assert closed.base_checksum == info.base_checksum


def test_tokens_outside_the_vocabulary_never_reach_the_device(run: Connection) -> None:
    good = batch()
    bad = msgspec.structs.replace(
        good, batch=msgspec.structs.replace(good.batch, completions=good.batch.completions + 99)
    )
    with pytest.raises(LoradError, match="in the completions is none of the 128 of the base"):
        run.call("forward_backward", bad)
    assert learn(run).applied


def test_no_driver_names_the_slot_itself(run: Connection) -> None:
    run.call("forward_backward", msgspec.structs.replace(batch(), slot="another"))
    assert learn(run).applied


def test_samples_that_nobody_streams_come_in_one_piece(run: Connection) -> None:
    streamed = Sampling(max_new_tokens=8)
    *items, done = run.stream(
        "generate", Generate("base", prompts(), msgspec.structs.replace(streamed, stream=False))
    )
    assert len(items) == 1 and done.samples == 16
    assert texts(list(items[0].split(prompts()))) == texts(generate(run, "base"))
