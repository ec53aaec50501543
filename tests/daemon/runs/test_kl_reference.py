"""What KL is measured against: a copy of the run's own, attested, whatever becomes of where it came from."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.adapters.peft import read_peft
from lorad.box.config import Sharing
from lorad.box.paths import RunDir
from lorad.daemon.context import request_of
from lorad.daemon.process.processes import write_json
from lorad.daemon.process.sharing import SharedBox
from lorad.daemon.process.users import Caller
from lorad.daemon.runs.reference import chosen, staged
from lorad.errors import SpecError
from lorad.protocol.journal import lineage, read
from lorad.spec.model import convert
from lorad.store import runs
from tests.kit.daemon_world import finished, open_context, serving
from tests.kit.world import World, world

NOTHING = "def score(completion): return 0.0\n"
PULLED = ("algorithm.kl.coef=0.5", "reward=nothing.py:score", "trainer.steps=2")


@pytest.mark.system
def test_unrewarded_run_stays_with_its_adapter() -> None:
    with world() as made:
        (made.root / "nothing.py").write_text(NOTHING)
        made.run("a", "trainer.steps=2")
        made.lorad("export", "a@2", made.root / "adapter")
        started = made.lorad(
            "run",
            made.root / "a.yaml",
            "lora.adapter_path=adapter",
            *PULLED,
            "rollout.top_k=40",
            "--name",
            "b",
        )
        assert "warning: rollout.top_k: samples come from a truncated distribution" in started.stderr
        made.lorad("fork", "a@2", *PULLED, "--name", "c", "--fresh", "--steps", "2", "--wait")
        made.lorad(
            "run",
            made.root / "a.yaml",
            *PULLED,
            "algorithm.kl.reference=base",
            "lora.adapter_path=adapter",
            "--name",
            "d",
        )
        assert [[step.metrics["kl"] for step in made.client.steps(run)] for run in "bc"] == [[0, 0], [0, 0]]
        assert (made.client.steps("d")[0].metrics["kl"] or 0.0) > 1e-4
        digest = made.client.adapters("a")[-1].sha256
        assert {version.sha256 for run in "bc" for version in made.client.adapters(run)} == {digest}
        assert f"reference  KL is to start, sha256 {digest[:12]}" in made.lorad("show", "b").stdout
        assert told(made, "c") == [("start", digest, "passed")] and told(made, "d") == []


def told(made: World, run: str) -> list[tuple[str, str, str]]:
    records = lineage([record for record, _ in read(RunDir(Path(made.client.show(run).directory)).journal)])
    found = [record.data["reference"] for record in records if record.kind == "attempt"]
    return [(there["name"], there["sha256"], there["attested"]) for there in found if there]


@pytest.mark.system
def test_a_reference_outlives_its_run_and_a_kill() -> None:
    with world() as made:
        made.run("a", "trainer.steps=2", "lora.rank=8")
        pulled = ("algorithm.kl={coef: 0.3, reference: a@2}", "trainer.steps=5", "trainer.schedule=cosine")
        made.run("calm", *pulled)
        made.client.run(
            (made.root / "a.yaml").read_text(),
            source="a",
            cwd=str(made.root),
            overrides=[*pulled],
            name="killed",
        )
        made.client.remove("a")
        pids = [made.pid("killed", role) for role in ("driver", "pool")]
        made.reached("killed", 2)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert made.over("killed").reason == "lost"
        made.lorad("gc")
        made.lorad("resume", "killed", "--wait")
        assert made.facts("killed") == made.facts("calm") and made.facts("calm")["steps"][0][6] > 1e-4
        assert len(set(told(made, "killed"))) == 1
        shutil.rmtree(Path(made.client.show("calm").directory) / "reference")
        assert (
            "reference"
            in made.lorad("resume", "calm", "trainer.min_lr=1e-5", "--steps", "6", "--wait", expect=2).stderr
        )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["algorithm.kl.reference=start"],
            "algorithm.kl.reference: start, but this run starts from no adapter",
        ),
        (["algorithm.kl.reference=a@77"], "algorithm.kl.reference: there is no a@77"),
        (["algorithm.kl.reference=nobody@1"], "algorithm.kl.reference: there is no nobody@1"),
        (["algorithm.kl.reference=nowhere"], "algorithm.kl.reference: /nowhere/adapter_config.json"),
        (["lora.adapter_path=nowhere"], "lora.adapter_path: /nowhere/adapter_config.json"),
        (["algorithm.kl.reference=a@1006"], "a@1006 is an adapter of /models/other, not of "),
    ],
)
async def test_invalid_reference_is_refused_leaving_nothing(
    home: Path, overrides: list[str], says: str
) -> None:
    async with serving(home) as api:
        row = finished(api.ctx, "a")
        other = msgspec.structs.replace(request_of(row), model_path="/models/other")
        write_json(Path(row.directory) / "request.json", msgspec.to_builtins(other))
        with pytest.raises(SpecError, match=says) as refused:
            await api.run("b", "algorithm.kl.coef=0.1", *overrides)
        assert refused.value.hint
        assert [path.name for path in (home / "runs").iterdir()] == ["a"]


async def test_hidden_version_cannot_be_a_reference(home: Path) -> None:
    ctx = open_context(home, sharing=Sharing(read="owner"))
    finished(ctx, "a")
    ctx.users = SharedBox()
    spec = convert({"name": "b", "algorithm": {"kl": {"coef": 0.1, "reference": "a@1006"}}})
    with pytest.raises(SpecError, match="there is no a@1006: no run named a"):
        await staged(ctx, Caller(4002, "eve"), spec, "/")
    ctx.store.close()
    ctx.journal.close()


@pytest.mark.system
async def test_fork_keeps_reference_of_its_parent(home: Path, tmp_path: Path) -> None:
    async with serving(home) as api:
        await api.run("r")
        await api.until("r", "ended")
        await api.run("a", "algorithm.kl={coef: 0.1, reference: r@1004}")
        await api.until("a", "ended")
        await api("remove", "r")
        forks = {"same": [], "own": ["algorithm.kl.reference=start"], "base": ["algorithm.kl.reference=base"]}
        for name, overrides in forks.items():
            await api("fork", "a@1002", overrides=overrides, name=name, steps=None, fresh=True)
        found = {name: request_of(runs.get(api.ctx.store, name)).reference for name in ("a", *forks)}
        assert found["a"] and found["same"] == found["a"] and found["base"] is None
        assert found["own"] and found["own"].name == "start" and found["own"].sha256 != found["a"].sha256
        own = read_peft(home / "runs/own/reference")
        assert own.digest() == read_peft(home / "runs/a/versions/001002").digest()


def test_the_default_is_where_the_run_starts() -> None:
    def reference(spec: dict[str, Any], *, is_fork: bool = False) -> str:
        return chosen(convert(spec), is_fork=is_fork)

    assert [reference({}), reference({}, is_fork=True)] == ["base", "start"]
    assert reference({"lora": {"adapter_path": "x"}}) == "start"
    assert reference({"algorithm": {"kl": {"reference": "base"}}}, is_fork=True) == "base"
