"""The demo, from the command line to PEFT: one finished run of `examples/demo.yaml`, looked at from every
side.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorad.adapters.directory import verify
from lorad.models.directory import resolve
from tests.kit.world import REPOSITORY, World, world

pytestmark = pytest.mark.system

RUN_KEYS = {
    *("name", "state", "reason", "step", "steps", "reward", "eval_first", "eval_last"),
    *("version", "owner", "pool", "created_at"),
}
VERSION_KEYS = {
    *("run", "version", "step", "sha256", "path", "rank", "alpha", "parent", "created_at"),
    *("loaded", "pinned", "aliases", "attested"),
}


STEPS = 20  # of the 60 of the example: 0.9 is held out from the fourth on
PROBLEMS = "eval.problems=128"
VERSION, BEFORE = f"demo@{STEPS}", f"demo@{STEPS - 1}"  # the last one, and what the last step sampled


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[World, Any]]:
    with world() as made:
        example = REPOSITORY / "examples" / "demo.yaml"
        shorter = (f"trainer.steps={STEPS}", f"eval.every={STEPS}", PROBLEMS, "checkpoint.every=5")
        yield made, made.json("run", example, *shorter, "--name", "demo", "--wait")


def test_demo_lifts_held_out_exact_match(demo: tuple[World, Any]) -> None:
    _, run = demo
    assert run["state"] == "ended" and run["reason"] == "completed"
    assert run["step"] == run["steps"] == STEPS
    assert run["eval_first"] < 0.35
    assert run["eval_last"] >= 0.80


def test_json_has_the_keys_that_scripts_rely_on(demo: tuple[World, Any]) -> None:
    made, run = demo
    shown = made.json("show", "demo")
    assert run.keys() >= RUN_KEYS
    assert made.json("list")[0].keys() >= RUN_KEYS
    assert RUN_KEYS | {"processes", "directory"} <= shown.keys()
    assert {"pid", "gateway"} <= made.json("daemon", "status").keys()
    assert all(version.keys() >= VERSION_KEYS for version in made.json("adapters", "demo"))
    checkpoints = made.json("checkpoints", "demo")
    assert all({"run", "step", "version", "path", "bytes", "created_at"} <= c.keys() for c in checkpoints)


def test_every_version_is_attested_and_numbered_once(demo: tuple[World, Any]) -> None:
    versions = demo[0].json("adapters", "demo")
    assert [v["version"] for v in versions] == list(range(STEPS + 1))
    assert {v["attested"] for v in versions} == {"passed"}


def test_keep_prunes_old_checkpoints(demo: tuple[World, Any]) -> None:
    made, _ = demo
    assert [c["step"] for c in made.json("checkpoints", "demo")] == [STEPS - 10, STEPS - 5, STEPS]
    directory = Path(made.json("show", "demo")["directory"])
    assert len(list((directory / "checkpoints").iterdir())) == 3


def test_engine_and_trainer_agree_on_every_step(demo: tuple[World, Any]) -> None:
    differences = [s.metrics["logprob_difference_max"] or 0.0 for s in demo[0].client.steps("demo")]
    assert max(differences) <= 1e-4


def test_scripts_wait_for_runs_and_figures(demo: tuple[World, Any]) -> None:
    made, run = demo
    assert f"demo is ended (completed) at step {STEPS} of {STEPS}" in made.lorad("wait", "demo").stderr
    assert made.json("wait", "demo", "--metric", "eval>0.8")[0]["name"] == "demo"
    missed = made.lorad("wait", "de*", "--metric", "eval>2", expect=1).stderr
    assert f"eval>2 was never true: eval was {run['eval_last']:.4g} in the end" in missed
    assert "'eval=>2' is no condition" in made.lorad("wait", "demo", "--metric", "eval=>2", expect=2).stderr
    made.lorad("wait", "nobody", expect=3)
    keys = ("trainer.steps=9000", "eval.every=0")
    made.lorad("run", REPOSITORY / "examples" / "demo.yaml", "--name", "long", "-d", *keys)
    late = made.lorad("wait", "long", "--metric", "step>=8000", "--timeout", "1s", expect=1).stderr
    made.lorad("kill", "long", "--wait")
    assert "long is" in late and "of 9000 after" in late


def test_export_has_tokenizer_and_card_and_merges(demo: tuple[World, Any], tmp_path: Path) -> None:
    made, _ = demo
    made.lorad("export", VERSION, tmp_path / "adapter")
    assert {"README.md", "tokenizer.json"} <= verify(tmp_path / "adapter").keys()
    assert "| algorithm | grpo |" in (tmp_path / "adapter" / "README.md").read_text()
    merged = made.json("export", VERSION, tmp_path / "model", "--merge")
    assert merged["path"] == str(tmp_path / "model")
    resumed = made.json(
        "run",
        REPOSITORY / "examples" / "demo.yaml",
        "--name",
        "again",
        "--wait",
        "trainer.steps=1",
        PROBLEMS,
        f"model.path={tmp_path / 'model'}",
    )
    assert resumed["eval_first"] == made.json("show", "demo")["eval_last"]
    weights = bytearray((tmp_path / "model" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model" / "model.safetensors").write_bytes(weights)
    other = made.lorad("export", "again@1", tmp_path / "other", "--merge", expect=1).stderr
    assert "are not those that again was trained on" in other
    assert not list(tmp_path.glob("*other*"))


def test_peft_computes_the_same_with_exported_version(
    demo: tuple[World, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    made, _ = demo
    target = made.root / "exported"
    made.lorad("export", VERSION, target)
    verify(target)
    monkeypatch.chdir(tmp_path)  # PEFT finds the base from any directory
    tokenizer = AutoTokenizer.from_pretrained(resolve("builtin:tiny"))
    model = AutoPeftModelForCausalLM.from_pretrained(target)
    for sample in made.client.samples("demo", step=STEPS)[::16]:
        assert sample.version == BEFORE
    for prompt in ("S:5172=", "S:90316284="):
        ours = made.json("generate", VERSION, prompt, "--max-new-tokens", "12")["completions"][0]["text"]
        assert ours == greedy(model, tokenizer, prompt)
    compare_logprobs(made, model, tokenizer)


def greedy(model: Any, tokenizer: Any, prompt: str) -> str:
    import torch

    ids = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def compare_logprobs(made: World, model: Any, tokenizer: Any) -> None:
    """The engine's log-probabilities of the last samples against PEFT's for the version that made them."""
    import torch

    made.lorad("export", BEFORE, made.root / "exported59")
    model.load_adapter(made.root / "exported59", adapter_name="before")
    model.set_adapter("before")
    for sample in made.client.samples("demo", step=STEPS)[::16]:
        prompt = tokenizer(sample.prompt)["input_ids"]
        ids = torch.tensor([prompt + sample.tokens])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float(), -1)
        theirs = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        assert np.abs(theirs - np.array(sample.logprobs)).max() <= 1e-4
