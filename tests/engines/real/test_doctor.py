"""`lorad doctor --engine` with the real servers."""

import ast
import json
import subprocess
from pathlib import Path

import pytest

from lorad.servers.table import SERVERS
from tests.engines.real.places import ENVIRONMENT, SECRET, python_of
from tests.kit.world import World, world


def checks(made: World, kind: str, *options: str) -> dict[str, bool]:
    made.home.root.mkdir(parents=True)
    backend = {"python": python_of(kind), "env": ENVIRONMENT[kind]}
    made.home.config.write_text(json.dumps({"backends": {kind: backend}}))
    done = made.lorad("doctor", "--engine", kind, "--json", *options)
    assert SECRET not in done.stdout + done.stderr
    return {check["name"]: check["ok"] for check in json.loads(done.stdout)}


@pytest.mark.long
def test_sound_installation_passes_every_check(kind: str) -> None:
    with world() as made:
        found = checks(made, kind)
    assert {"interpreter", "torch", "command", "start", "load", "sample", "score", "stop", "logprobs"} <= set(
        found
    )
    assert all(found.values())


# what asks an interpreter for its packages knows nothing of the kind: CI takes one
@pytest.mark.parametrize("kind", ["sglang", pytest.param("vllm", marks=pytest.mark.long)], indirect=True)
def test_without_a_probe_nothing_is_started(kind: str) -> None:
    with world() as made:
        found = checks(made, kind, "--no-probe")
    assert "command" in found and "start" not in found


def test_sglang_has_the_list_that_lorad_knows(kind: str) -> None:
    if kind != "sglang":
        pytest.skip("vLLM has no such list")
    code = "import importlib.util; print(importlib.util.find_spec('sglang').origin)"
    done = subprocess.run([python_of(kind), "-c", code], capture_output=True, text=True, check=True)
    tree = ast.parse((Path(done.stdout.strip()).parent / "srt" / "utils" / "common.py").read_text())
    known = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED_LORA_TARGET_MODULES"
    )
    assert frozenset(known) == SERVERS["sglang"].targets
