"""A whole run with a real engine: it learns, each version is attested, and `kill -9` of anything costs time
only.
"""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from lorad.adapters.directory import MANIFEST
from lorad.adapters.peft import CONFIG, write_peft
from lorad.adapters.targets import match_modules
from tests.engines.real.places import OF_RUNS, SHAPES, python_of
from tests.kit.fakes.random_adapters import partial, random_adapter
from tests.kit.warm.ranks import interpreter
from tests.kit.world import REPOSITORY, SMALL, World, world

MOE_DEMO = REPOSITORY / "examples" / "demo-moe.yaml"
SPEC = """
data: {train: sort, eval: sort}
trainer: {lr: 1.0e-3}
eval: {every: 30, problems: 256}
"""


def configure(made: World, kind: str, **more: str) -> None:
    made.home.root.mkdir(parents=True, exist_ok=True)
    backend = {"python": interpreter(python_of(kind)), "env": OF_RUNS[kind], **more}
    made.home.config.write_text(json.dumps({"backends": {kind: backend}}))  # YAML has JSON in it


def kill_server(made: World, run: str, kind: str) -> None:
    """The server's main process, as an out-of-memory killer would; that of a fork ends with what asked for
    it.
    """
    pool = psutil.Process(made.pid(run, "pool"))
    begin = [(p, " ".join(p.cmdline()[:5])) for p in pool.children(recursive=True)]
    launched = [p for p, words in begin if f"engines/{kind}/launch.py" in words]
    assert launched, begin
    os.kill(launched[0].pid, signal.SIGKILL)


UNTIL_IT_LEARNED = (30, 6, 12)
"""How many steps, and before which the server and the pool are killed."""


# CI kills that of a run whose trainer is another one: test_matrix; on vLLM one that samples: test_life
@pytest.mark.long
def test_run_outlives_its_server(kind: str) -> None:
    with world() as made:
        configure(made, kind)
        backend = f"rollout.backend={kind}"
        few = "trainer.steps=5", "eval.problems=32", backend
        made.lorad("run", made.spec(SPEC), *few, "--name", "sorter", "--detach")
        made.reached("sorter", 2)
        kill_server(made, "sorter", kind)
        made.reached("sorter", 5)
        shown = made.completed("sorter")
        assert len(shown.attempts) == 1, "the loss of a server must not end the run"
        assert {version.attested for version in made.client.adapters("sorter")} == {"passed"}
        assert "lora" in made.lorad("logs", "sorter", "--of", "engine").stdout.lower()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["resident", "timesliced"])
def test_run_outlives_its_server_and_its_pool(kind: str, mode: str) -> None:
    whole, first, second = UNTIL_IT_LEARNED
    with world() as made:
        configure(made, kind)
        length = (f"trainer.steps={whole}", f"checkpoint.every={first - 1}")
        backends = (f"rollout.backend={kind}", f"pool.mode={mode}")
        made.lorad("run", made.spec(SPEC), *length, *backends, "--name", "sorter", "--detach")
        made.reached("sorter", first)
        kill_server(made, "sorter", kind)
        made.reached("sorter", second)
        assert len(made.client.show("sorter").attempts) == 1, "the loss of a server must not end the run"
        os.kill(made.pid("sorter", "pool"), signal.SIGKILL)
        assert made.over("sorter").reason == "lost"
        made.lorad("resume", "sorter", "--detach")
        made.reached("sorter", whole)
        shown = made.over("sorter")
        assert (shown.reason, shown.step) == ("completed", whole), shown
        assert (shown.eval_last or 0.0) >= 0.8, shown
        versions = made.client.adapters("sorter")
        assert {version.attested for version in versions} == {"passed"}


FEW = (
    *("trainer.steps=2", "data.prompts_per_step=4", "eval.every=0", "checkpoint.every=2"),
    "attest.amplified_every=1",
)


# CI makes this run on SGLang with the routes of its tokens: test_routes
@pytest.mark.long
def test_demo_of_experts_is_always_attested(kind: str) -> None:
    with world() as made:
        configure(made, kind)
        made.lorad("run", MOE_DEMO, f"rollout.backend={kind}", *FEW, "--name", "moe", "--detach")
        made.completed("moe")
        versions = made.client.adapters("moe")
        assert len(versions) == 3 and {version.attested for version in versions} == {"passed"}
        config = json.loads((Path(versions[-1].path or "") / CONFIG).read_bytes())
        assert {"q_proj", "gate_proj", "up_proj", "down_proj"} <= set(config["target_modules"])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
def test_experts_that_a_server_drops_are_noticed(kind: str) -> None:
    """vLLM says nothing of adapters on linears that are none of its targets."""
    with world() as made:
        configure(made, kind, engine="tests.engines.real.forgetful:ForgetsExperts")
        made.lorad("run", MOE_DEMO, f"rollout.backend={kind}", *FEW, "--name", "moe", "--detach")
        shown = made.over("moe")
        assert shown.reason == "attestation_failed" and shown.step <= 1, shown


# test_truth compares with PEFT what both kinds compute of such adapters, in the form that each needs
@pytest.mark.long
def test_rslora_on_one_target_is_always_attested(kind: str) -> None:
    """SGLang knows no rsLoRA, and dies of up_proj or v_proj alone."""
    with world() as made:
        configure(made, kind)
        lora = ("lora.rslora=true", "lora.target_modules=up_proj", "attest.amplified_every=1")
        made.lorad("run", made.spec(SMALL), f"rollout.backend={kind}", *lora, "--name", "sorter", "--detach")
        made.reached("sorter", 2)
        kill_server(made, "sorter", kind)
        made.completed("sorter")
        made.lorad("fork", "sorter@6", "--name", "more", "--steps", 2, "--wait")
        for version in (*made.client.adapters("sorter"), *made.client.adapters("more")):
            assert version.attested == "passed", version
            manifest = json.loads((Path(version.path or "") / MANIFEST).read_bytes())
            assert manifest["facts"]["delivered_sha256"] not in ("", version.sha256) or kind == "vllm"
        (made.root / "v").mkdir()
        adapter = partial(random_adapter(SHAPES, 1), match_modules(SHAPES, "v_proj"), rslora=True)
        write_peft(adapter, made.root / "v", "builtin:tiny")
        made.lorad("serve", "builtin:tiny", f"rollout.backend={kind}", "--adapter", "bot=v")
        assert made.json("generate", "bot", "3 1 2")["version"] == "bot@0"
        assert made.client.adapters("bot")[0].attested == "passed"
