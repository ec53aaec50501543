"""The official client on the trainers and engines that lorad has: `make tinker-backends`, which writes what
it saw into docs/tinker.md.
"""

import json
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from lorad.protocol.journal import read
from tests.kit.world import World
from tests.tinker.real.seen import Seen
from tests.tinker.real.test_client import PYTHON, a_door, ended, said, started
from tests.trainers.real.pairs import configured, missing

PAIRS = {
    "fsdp, builtin": (),
    "fsdp (2 ranks), builtin": ("trainer.dp=2",),
    "megatron, builtin": (),
    "megatron (2 ranks), builtin": ("trainer.tp=2",),
    "builtin, sglang": (),
    "builtin, vllm": (),
    "fsdp, vllm": (),
}
"""Trainer and engine, and what else the spec says."""
CLOSE = 2e-4  # relative, of losses and norms of gradients

pytestmark = [pytest.mark.long, pytest.mark.skipif(not PYTHON, reason="no client is installed")]


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    seen = Seen()
    yield seen
    seen.write()


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def made(pair: str) -> Iterator[World]:
    """A home whose door makes models of that trainer and engine."""
    trainer, _, engine = pair.replace(" (2 ranks)", "").partition(", ")
    if absent := missing(trainer, engine):
        pytest.skip(f"{' and '.join(absent)}: no interpreter is named, `make tinker-backends` installs them")
    overrides = [f"trainer.backend={trainer}", f"rollout.backend={engine}", *PAIRS[pair]]
    with a_door(f", overrides: {json.dumps(overrides)}", json.dumps(configured(trainer, engine))) as home:
        yield home


def test_the_client_finds_nothing_wrong(made: World, pair: str, seen: Seen) -> None:
    output = said("client_check.py")
    print(output)
    assert output.splitlines()[-1].startswith("all "), output
    seen.checks(pair, output)


def test_every_method_is_known_or_refused(made: World, pair: str, seen: Seen) -> None:
    output = said("client_coverage.py")
    assert "all methods are known" in output
    seen.add("refused", pair, "in words")


def test_samplers_are_attested(made: World, pair: str, seen: Seen) -> None:
    name = run_of(made, "client_old.py")
    verdicts = [version.attested for version in made.client.adapters(name)]
    assert verdicts == ["passed"]
    assert "passed" in made.lorad("adapters", name).stdout
    seen.add("samplers_attested", pair, "passed")


def test_a_paused_model_goes_on_when_resumed(made: World, pair: str, seen: Seen) -> None:
    calm = ended(started("client_idle.py"), "\n").splitlines()[-1]
    before, process = names(made), started("client_idle.py")
    assert process.stdout is not None and process.stdout.readline() == "idle\n"
    [name] = names(made) - before
    made.lorad("pause", name, "--wait")
    made.lorad("resume", name, "--detach")
    assert_close(ended(process, "\n").splitlines()[-1], calm)
    seen.add("paused", pair, "yes")


def test_a_killed_pool_changes_no_number(made: World, pair: str, seen: Seen) -> None:
    """Samples of before and behind are the same, and steps that are done again are, up to noise."""
    calm = said("client_restart.py").splitlines()[-1]
    before, process = names(made), started("client_restart.py")
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "sampling\n"
    process.stdin.write("\n")
    process.stdin.flush()
    [name] = names(made) - before
    made.reached(name, 2)
    os.kill(made.pid(name, "pool"), signal.SIGKILL)
    struck = ended(process, "\n").splitlines()[-1]  # it waited amid its steps
    attempts = [record for record, _ in read(made.home.run(name).journal) if record.kind == "attempt"]
    assert len(attempts) > 1
    assert_close(struck, calm)
    seen.add("killed", pair, "bit for bit" if struck == calm else "yes")


def run_of(made: World, script: str) -> str:
    """Run a script of the client's; returns its first run."""
    before = names(made)
    said(script)
    return min(names(made) - before)


def names(made: World) -> set[str]:
    return {run.name for run in made.client.list(all=True)}


def assert_close(found: str, expected: str) -> None:
    one, two = (json.loads(text.replace("(", "[").replace(")", "]")) for text in (found, expected))
    np.testing.assert_allclose(one, two, rtol=CLOSE)
