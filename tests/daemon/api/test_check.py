"""A check of a spec leaves nothing behind; names that are in use are replaced or get a number."""

from pathlib import Path
from typing import Any

import pytest

from lorad.children.ask import under_guard
from lorad.cli.commands.specs.check import held_out_in_words, print_check
from lorad.daemon.runs.preflight import answer
from lorad.errors import Conflict, LoradError, SpecError
from lorad.records.checks import Check
from lorad.records.requests import RunRequest
from tests.kit.daemon_world import SPEC, Api, behave, serving


async def check(api: Api, *overrides: str, name: str | None = None) -> Check:
    made: Check = await api("check", RunRequest(SPEC, "a.yaml", "/", [*overrides], name))
    return made


async def started(api: Api, name: str, **options: Any) -> Any:
    return await api("run", SPEC, source="a.yaml", cwd="/", overrides=[], name=name, **options)


async def test_check_says_what_would_be_and_leaves_nothing(home: Path) -> None:
    async with serving(home) as api:
        found = await check(api, "lora.rank=4", name="a")
        assert (found.name, found.spec["lora"]["rank"], found.start.state) == ("a", 4, "now")
        assert found.algorithm.startswith("grpo: baseline group") and found.rate is not None
        assert found.spec["trainer"]["lr"] == found.rate.lr
        assert (found.files.versions, found.files.checkpoints, found.samples_per_step) == (7, 3, 128)
        assert await api("list", all=True) == [] and await api("history") == []
        assert list((home / "runs").iterdir()) == [] and not api.ctx.pools
        with pytest.raises(SpecError, match=r"lora\.rank"):
            await check(api, "lora.rank=13")  # the preflight refuses it
        assert list((home / "runs").iterdir()) == []


async def test_machine_without_processes_is_no_defect(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")  # as fork(2) says it

    async with serving(home) as api:
        monkeypatch.setattr("asyncio.create_subprocess_exec", refused)
        monkeypatch.setattr("lorad.daemon.runs.preflight.under_guard", under_guard)
        with pytest.raises(LoradError, match="no process or thread can be started") as raised:
            await check(api)
        assert "ulimit -u" in raised.value.hint


def test_check_that_found_no_process_says_so() -> None:
    said = b"lorad: cannot start ['python'] as user 4001: [Errno 11] Resource temporarily unavailable"
    with pytest.raises(SpecError, match="no process or thread can be started"):
        answer(b"", said, 1)


async def test_check_sees_a_name_in_use(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        found = await check(api, "lora.rank=4", name="a")
        assert found.warnings[0].startswith(
            "there is a run named a, so `lorad run` refuses this name. Choose "
        )
        assert found.spec["lora"]["rank"] == 4 and found.files.versions == 7
        assert (await check(api, name="b")).warnings == found.warnings[1:]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ((), "1,000 parameters, float32"),
        (("model.dtype=bfloat16",), "1,000 parameters, bfloat16 (its file has float32)"),
        (("model.quantize=nf4",), "1,000 parameters, float32, linears rounded to nf4"),
    ],
)
async def test_check_prints_the_dtype_of_the_run(
    keys: tuple[str, ...], says: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(home) as api:
        print_check(await check(api, *keys, name="a"), as_json=False)
        (model,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("model "))
        assert model.endswith(says)


@pytest.mark.parametrize(
    ("scored", "likely", "measured"),
    [
        (True, False, "the reward of greedy completions"),
        (True, True, "the reward of greedy completions and likelihood"),
        (False, False, "nothing is measured of them"),
    ],
)
def test_check_says_what_is_evaluated(scored: bool, likely: bool, measured: str) -> None:
    found = Check("a", {"eval": {"every": 5}}, held_out=8, eval_scored=scored, eval_likely=likely)
    assert held_out_in_words(found) == f"8 problems, every 5 steps: {measured}"
    assert held_out_in_words(Check("a", {"eval": {"every": 0}})) == "none, as eval.every is 0"


@pytest.mark.system
async def test_suffix_takes_the_first_free_number(home: Path) -> None:
    async with serving(home) as api:
        names = [(await started(api, "a", suffix=True)).name for _ in range(3)]
        assert names == ["a", "a-2", "a-3"]
        assert len((await started(api, "x" * 63)).name) == 63
        assert (await started(api, "x" * 63, suffix=True)).name == "x" * 61 + "-2"


async def test_replaced_run_goes_after_the_check(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        first = await api.until("a", "ended")
        with pytest.raises(SpecError):
            await api("run", SPEC, source="a", cwd="/", overrides=["lora.rank=13"], name="a", replace=True)
        assert (await api("show", "a")).created_at == first.created_at
        await started(api, "a", replace=True)
        again = await api.until("a", "ended")
        assert again.created_at > first.created_at and again.reason == "completed"


async def test_a_run_at_work_is_not_replaced(home: Path) -> None:
    behave(home, driver={"seconds": 30})
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "running")
        with pytest.raises(Conflict, match="run a is running"):
            await started(api, "a", replace=True)
        await api("kill", "a")
        await api.until("a", "ended")
