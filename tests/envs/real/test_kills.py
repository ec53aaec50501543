"""Kill -9 amid an episode of a package: of its process, the driver, the pool, and of all three together."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lorad.protocol.journal import lineage, read
from tests.end_to_end.test_environment_kills import VICTIMS
from tests.envs.real.test_packages import PYTHONS, TEMPLATE
from tests.kit.pool_kit import TINY
from tests.kit.world import World, world

pytestmark = pytest.mark.skipif(not all(PYTHONS.values()), reason="`make test-verifiers` has the packages")
SPEC = f"""
seed: 4
model: {{path: model}}
env: {{name: "verifiers:troubled-v0", python: {PYTHONS["0.3"]}, turns: 2, start_timeout: 3000}}
algorithm: {{group_size: 2}}
data: {{prompts_per_step: 2}}
trainer: {{lr: 2.0e-3, steps: 4}}
rollout: {{max_new_tokens: 4}}
eval: {{every: 0}}
checkpoint: {{every: 2}}
"""
HELD = 11  # episodes have begun, the last ones those of step 3


@pytest.fixture(scope="module")
def calm() -> Iterator[tuple[World, list[Any]]]:
    with world() as made:
        model = shutil.copytree(TINY, made.root / "model")
        (model / "chat_template.jinja").write_text(TEMPLATE)
        made.run("calm", args(made, "calm", held=0), text=SPEC)
        yield made, places(made, "calm")


def args(made: World, name: str, *, held: int) -> str:
    return f"env.args={{noted: {made.root / name}, count: 0, faults: [], held: {held}}}"


def places(made: World, name: str) -> list[Any]:
    """Which prompts each step had, and where it left the data."""
    facts = lineage([record for record, _ in read(made.home.run(name).journal)])
    return [(each.step, each.data["prompts"], each.data["position"]) for each in facts if each.kind == "step"]


@pytest.mark.parametrize("victims", VICTIMS)
def test_a_killed_run_keeps_its_place(calm: tuple[World, list[Any]], victims: str) -> None:
    made, expected = calm
    made.lorad("run", made.spec(SPEC), args(made, victims, held=HELD), "--name", victims, "--detach")
    waits = Path(made.root, f"{victims}.waits")
    made.until(waits.is_symlink, "an episode waits")
    pids = {"environment": int(waits.readlink().name)}
    pids |= {role: made.pid(victims, role) for role in ("driver", "pool")}
    for victim in VICTIMS[victims]:
        with suppress(ProcessLookupError):  # it went with another
            os.kill(pids[victim], signal.SIGKILL)
    if victims != "environment":
        assert made.over(victims).reason == "lost"
        before = {each.version: each.sha256 for each in made.client.adapters(victims)}
        made.lorad("resume", victims, "--wait")
        after = {each.version: each.sha256 for each in made.client.adapters(victims)}
        assert before.items() <= after.items()
        records = [record for record, _ in read(made.home.run(victims).journal)]
        begun = [record.data["resumed_from"] for record in records if record.kind == "attempt"]
        assert begun == [None, 2]
    assert made.over(victims).reason == "completed"
    assert places(made, victims) == expected
    samples = [sample for step in (1, 2, 3, 4) for sample in made.client.samples(victims, step=step)]
    assert len(samples) == 16 and {sample.error or "" for sample in samples} == {""}
    made.lorad("verify", victims)
