"""A resume may use another trainer, engine or topology; what defines the run stays as it was."""

import asyncio
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from lorad.box.config import Backend
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.resume import (
    change_spec,
    fit_lora_type,
    keep_schedule,
    refuse_standstill,
    resume,
    total_steps,
)
from lorad.daemon.context import request_of
from lorad.daemon.process.users import Caller
from lorad.driver.begin import compare_with_before, compare_with_reference
from lorad.errors import Conflict, LoradError, SpecError
from lorad.files import write_whole
from lorad.protocol.journal import Record, Reference
from lorad.protocol.status import PoolInfo
from lorad.records.requests import ResumeRequest
from lorad.spec.model import Spec, convert
from lorad.spec.text import from_json
from lorad.store import runs
from tests.kit.daemon_world import (
    ENDLESS,
    behave,
    finished,
    hold,
    reconciling,
    release,
    serving,
    submit,
    until,
    until_state,
)
from tests.kit.journals import a_run

OLD = convert({"trainer": {"steps": 6}})


def test_what_trains_and_samples_may_change() -> None:
    new = change_spec(OLD, ["trainer.backend=fsdp", "trainer.dp=2", "rollout.backend=vllm", "lora.type=lora"])
    assert (new.trainer.backend, new.trainer.dp, new.trainer.steps) == ("fsdp", 2, 6)
    assert (new.rollout.backend, new.lora.type, new.data) == ("vllm", "lora", OLD.data)
    assert change_spec(OLD, []) == OLD


def test_what_the_run_is_may_be_said() -> None:
    assert change_spec(OLD, [f"lora.rank={OLD.lora.rank}", f"seed={OLD.seed}"]) == OLD


@pytest.mark.parametrize(
    "override",
    ["lora.rank=8", "data.train=arith", "seed=1", "model.path=x", "name=b", "reward=f", "algorithm.epochs=2"],
)
def test_what_the_run_is_may_not(override: str) -> None:
    with pytest.raises(SpecError, match=r"is part of what this run is") as refused:
        change_spec(OLD, [override])
    assert override in refused.value.message and "Start a new run" in refused.value.hint


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.dpp=2", "override trainer.dpp=2: trainer.dpp: unknown key"),
        ("trainer.dp=0", "override trainer.dp=0: trainer.dp: Expected int >= 1"),
        ("dp=2", "dp: unknown key"),
        ("trainer.dp", "not of the form key=value"),
    ],
)
def test_invalid_override_is_refused(override: str, says: str) -> None:
    with pytest.raises(SpecError) as refused:
        change_spec(OLD, [override])
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ((), []),
        ((6,), ["steps 5 to 6 are made again: its newest checkpoint is of step 4 (checkpoint.every is 2)"]),
        (
            (2, 4, 6),
            ["steps 1 to 6 are made again: it has no checkpoint yet (checkpoint.every is 2)"],
        ),
    ],
)
async def test_resume_says_which_steps_are_made_again(
    home: Path, without: tuple[int, ...], says: list[str]
) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        with api.ctx.store.write() as connection:
            connection.execute("UPDATE runs SET reason = 'lost' WHERE name = 'a'")
            for step in without:
                connection.execute("DELETE FROM checkpoints WHERE run = 'a' AND step = ?", (step,))
        assert (await api("resume", "a", steps=8)).warnings == says


async def test_next_attempt_uses_and_shows_changed_spec(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "ended")
        await api(
            "resume", "a", steps=8, overrides=["trainer.backend=fsdp", "trainer.dp=2", "resources.priority=3"]
        )
        shown = await api.until("a", "ended")
        assert (shown.reason, shown.step, shown.spec["trainer"]["backend"]) == ("completed", 8, "fsdp")
        first, second = shown.attempts
        assert first.changed == {} and second.resumed_from == 6
        assert second.changed == {"trainer.backend": "fsdp", "trainer.dp": 2, "resources.priority": 3}
        row = runs.get(api.ctx.store, "a")
        assert (row.priority, api.ctx.pools[row.pool or ""].setup.trainer) == (3, "fsdp")
        told = [from_json(row.dir.attempt(number).spec.read_bytes()).trainer.dp for number in (1, 2)]
        assert told == [1, 2]


async def test_an_early_resume_is_told_when(home: Path) -> None:
    hold(home)
    async with serving(home) as api:
        await api.run("a", ENDLESS)
        await api.until("a", "running")
        await api("pause", "a")
        await api.until("a", "stopping")
        with pytest.raises(Conflict, match="run a is stopping") as refused:
            await api("resume", "a")
        assert "`lorad wait a` returns then" in refused.value.hint
        release(home)
        await api.until("a", "paused")


async def test_steps_may_be_given_as_a_key(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        await api("resume", "a", overrides=["trainer.steps=8"])
        assert (await api.until("a", "ended")).step == 8


async def test_refused_change_leaves_run_unchanged(home: Path) -> None:
    async with serving(home) as api:
        behave(home, preflight={"refuses": "trainer.backend: not here"})
        finished(api.ctx)
        before = await api("show", "a")
        for overrides in (["lora.rank=8"], ["trainer.dp=2"]):
            with pytest.raises(LoradError):
                await api("resume", "a", steps=8, overrides=overrides)
        after = await api("show", "a")
        assert after.spec == before.spec and after.state == "ended" and len(after.attempts) == 1


async def test_refused_of_two_resumes_leaves_no_trace(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        bodies = [ResumeRequest(steps=8, overrides=[f"resources.priority={n}"]) for n in (1, 2)]
        request = cast("Any", SimpleNamespace(match_info={"run": "a"}))
        calls = [Call(request, Caller(0, "me"), msgspec.json.encode(body)) for body in bodies]
        done = await asyncio.gather(*(resume(api.ctx, call) for call in calls), return_exceptions=True)
        [late] = [result for result in done if isinstance(result, Conflict)]
        assert "changed while" in late.message and "lorad show a" in late.hint
        row = runs.get(api.ctx.store, "a")
        assert request_of(row).overrides == [f"resources.priority={row.priority}"]
        await api.until("a", "ended")


@pytest.mark.parametrize(
    ("trained", "kept"),
    [
        (convert({"trainer": {"backend": "megatron"}, "lora": {"type": "lora"}}), "lora"),
        (convert({"trainer": {"backend": "fsdp"}, "lora": {"type": "lora"}}), "canonical_lora"),
        (convert({"trainer": {"backend": "megatron"}}), "canonical_lora"),
        (None, "canonical_lora"),
    ],
)
def test_only_megatron_checkpoints_share_one_a(trained: Spec | None, kept: str) -> None:
    shared = convert({"trainer": {"backend": "megatron"}, "lora": {"type": "lora"}})
    assert fit_lora_type(shared, ["trainer.backend=megatron"], trained).lora.type == kept
    assert fit_lora_type(OLD, [], trained) == OLD
    if kept == "lora":
        assert fit_lora_type(shared, ["lora.type=lora"], trained) == shared
        return
    with pytest.raises(SpecError, match=r"override lora.type=lora: .* share one A") as refused:
        fit_lora_type(shared, ["lora.type=lora"], trained)
    assert "canonical_lora" in refused.value.hint


async def test_megatron_resume_uses_the_checkpoints_lora_type(home: Path) -> None:
    backends = {"megatron": Backend(python=Path(sys.executable))}
    async with serving(home, backends=backends) as api:
        await api.run("a", "lora.type=lora")
        await api.until("a", "ended")
        await api("resume", "a", steps=8, overrides=["trainer.backend=megatron"])
        second = await api.until("a", "ended")
        assert second.attempts[1].changed == {"trainer.backend": "megatron", "lora.type": "canonical_lora"}
        with pytest.raises(SpecError, match="share one A"):
            await api("resume", "a", steps=9, overrides=["lora.type=lora"])


@pytest.mark.parametrize(
    ("steps", "overrides", "expected"),
    [
        (None, [], 8),
        (None, ["trainer.lr=0.1"], 8),
        (9, ["trainer.lr=0.1"], 9),
        (None, ["trainer.steps=7"], 7),
        (None, ["trainer.steps=6"], 6),
        (None, ["trainer={lr: 0.1, steps: 7}"], 7),
        (7, ["trainer.steps=7"], 7),
    ],
)
def test_steps_are_the_number_asked_for_last(steps: int | None, overrides: list[str], expected: int) -> None:
    assert total_steps(ResumeRequest(steps=steps, overrides=overrides), a_run(steps=8), OLD) == expected


@pytest.mark.parametrize("more", [{"steps": 120}, {"overrides": ["trainer.steps=120"]}])
async def test_more_steps_do_not_stretch_the_schedule(home: Path, more: dict[str, Any]) -> None:
    behave(home, driver={"seconds": 0.06})
    async with serving(home) as api:
        await api.run("a", "trainer.schedule=cosine", "trainer.steps=40")
        await until(lambda: runs.get(api.ctx.store, "a").step >= 2)
        await api("pause", "a")
        await api.until("a", "paused")
        await api("resume", "a", **{"steps": None, "overrides": []} | more)
        shown = await api("show", "a")
        assert (shown.steps, shown.spec["trainer"]["schedule_steps"]) == (120, 40)
        await api("kill", "a")


@pytest.mark.parametrize(
    ("trainer", "done", "refused"),
    [({}, 6, True), ({"min_lr": 1e-5}, 6, False), ({}, 4, False), ({"schedule": "constant"}, 6, False)],
)
def test_resume_at_rate_zero_is_refused(trainer: dict[str, Any], done: int, refused: bool) -> None:
    spec = convert({"trainer": {"lr": 1e-3, "steps": 6, "schedule": "cosine"} | trainer})
    spec = keep_schedule(spec, spec, 6, 9)
    with pytest.raises(SpecError, match="steps 7 to 9 would change nothing") if refused else nullcontext():
        refuse_standstill(spec, done, 9)


@pytest.mark.parametrize("override", ["trainer.steps=7", "trainer={steps: 7}", "trainer.steps=6"])
def test_two_numbers_of_steps_are_refused(override: str) -> None:
    with pytest.raises(SpecError, match=r"--steps 9, but trainer.steps is \d") as refused:
        total_steps(ResumeRequest(steps=9, overrides=[override]), a_run(steps=8), OLD)
    assert refused.value.hint


def info(**facts: str) -> PoolInfo:
    names = ["pool", "model", "model_path", "base_checksum", "trainer", "engine", "mode", "device", "dtype"]
    plain = dict.fromkeys(names, "x") | {"pid": 1, "threads": 1, "max_tokens": 1, "versions": {}}
    return PoolInfo(**cast("Any", plain | facts))


def compared(attempts: list[dict[str, Any]], now: PoolInfo, **trainer: Any) -> list[str]:
    """The warnings."""
    told: list[str] = []
    plain = [{"data_sha256": "d"} | attempt for attempt in attempts]
    records = [Record(1, 1, "a", 1, 0, "attempt", 0.0, data) for data in plain]
    data, spec = SimpleNamespace(digest="d"), convert({"trainer": trainer})
    compare_with_before(
        cast("Any", SimpleNamespace(train_data=data, spec=spec, warn=told.append)), now, records
    )
    return told


FIRST = {"base_checksum": "c", "trainer": "builtin", "sizes": {}}
FSDP = {"base_checksum": "f", "trainer": "fsdp", "sizes": {"dp": 2}}


@pytest.mark.parametrize(
    ("attempts", "now", "warnings"),
    [
        ([FIRST], info(base_checksum="c", trainer="builtin", model_sha256="m"), 0),
        (
            [FIRST | {"model_sha256": "m"}],
            info(base_checksum="other", trainer="builtin", model_sha256="m"),
            0,
        ),
        ([FIRST], info(base_checksum="f", trainer="fsdp", model_sha256="m"), 1),
        ([FIRST], info(base_checksum="f", trainer="fsdp"), 1),
        ([FSDP], info(base_checksum="f", trainer="fsdp"), 0),
        ([FSDP | {"sizes": {}}], info(base_checksum="other", trainer="fsdp"), 1),
        ([FIRST, FSDP], info(base_checksum="c", trainer="builtin"), 0),
        (
            [FSDP | {"model_sha256": "m"}, FIRST],
            info(base_checksum="x", trainer="megatron", model_sha256="m"),
            0,
        ),
    ],
)
def test_bases_are_compared_by_shared_facts(
    attempts: list[dict[str, Any]], now: PoolInfo, warnings: int
) -> None:
    told = compared(attempts, now, dp=2 if now.trainer == "fsdp" else 1)
    assert len(told) == warnings and all("nothing shows" in message for message in told)


@pytest.mark.parametrize(
    ("attempts", "now"),
    [
        ([FIRST], info(base_checksum="other", trainer="builtin", model_sha256="m")),
        ([FIRST | {"model_sha256": "m"}], info(base_checksum="c", trainer="builtin", model_sha256="other")),
        (
            [FIRST | {"model_sha256": "m"}, FSDP],
            info(base_checksum="f", trainer="fsdp", model_sha256="other"),
        ),
        ([FIRST, FSDP], info(base_checksum="other", trainer="builtin")),
        ([FSDP], info(base_checksum="other", trainer="fsdp")),
    ],
)
def test_another_base_is_refused(attempts: list[dict[str, Any]], now: PoolInfo) -> None:
    with pytest.raises(Conflict, match="not those that this run was trained on"):
        compared(attempts, now, dp=2 if now.trainer == "fsdp" else 1)


def test_a_reference_of_other_weights_is_refused() -> None:
    now = info(model_sha256="m")
    for bases in ([], [{"model_sha256": "m"}]):
        compare_with_reference(Reference("a@1", "", bases=bases), now, {})
    with pytest.raises(Conflict, match=r"are not those that a@1, algorithm\.kl\.reference, was trained on"):
        compare_with_reference(Reference("a@1", "", bases=[{"model_sha256": "other"}]), now, {})


async def test_spec_of_an_attempt_is_kept_durably(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_durable: dict[Path, bool] = {}

    def write(path: Path, data: bytes, *, durable: bool = True) -> None:
        is_durable[path] = durable
        write_whole(path, data, durable=durable)

    monkeypatch.setattr("lorad.daemon.process.processes.write_whole", write)
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        attempt = (await until_state(ctx, "a", "ended")).attempt_dir
    assert is_durable[attempt.spec] and not is_durable[attempt.command]
