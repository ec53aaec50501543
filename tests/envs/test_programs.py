"""Processes of agent programs: an episode's fault is its own, and nothing of them is left."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lorad.envs.programs import Play, Played, Programs
from lorad.errors import SpecError
from lorad.spec.env import EnvSpec
from tests.kit.pool_kit import until

SLEEP = f"9{os.getpid()}.5"  # seconds; no other worker of the tests has the same
AGENT = f"""
import os, subprocess

async def run(base_url, task, sampling):
    if task["does"] == "fork":
        subprocess.Popen(["sleep", "{SLEEP}"], start_new_session=True)
    if task["does"] == "die":
        os.kill(os.getpid(), 9)
    return ("SECRET" in os.environ) + 2 * (os.environ.get("NAMED") == "given")
"""


def sleepers() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if SLEEP in (p.info["cmdline"] or [])]


def children() -> set[psutil.Process]:
    mine = psutil.Process().children(recursive=True)
    return {one for one in mine if one.is_running() and one.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture
def before() -> set[psutil.Process]:
    """The processes that tests before this one keep for later ones."""
    return children()


@pytest.fixture(params=[None, sys.executable], ids=["own", "other"])
def programs(
    request: pytest.FixtureRequest, before: set[psutil.Process], tmp_path: Path
) -> Iterator[Programs]:
    """Of one process, in lorad's interpreter or one that the spec names."""
    (tmp_path / "agent.py").write_text(AGENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", "secret")
        patch.setenv("NAMED", "given")
        spec = EnvSpec(name="agent.py:run", workers=1, pass_env=["NAMED"], python=request.param)
        made = Programs(spec, tmp_path)
    yield made
    made.close()


def played(programs: Programs, does: str) -> Played:
    return programs.play(Play("http://127.0.0.1:9/v1", {"does": does}, {}))


def test_nothing_of_a_program_is_left(programs: Programs, before: set[psutil.Process]) -> None:
    assert played(programs, "fork").reward == 2.0
    until(lambda: len(sleepers()) == 1)  # a process has no command line for a moment within exec
    programs.close()
    until(lambda: not sleepers())
    assert children() <= before


def test_no_secret_reaches_a_program(programs: Programs) -> None:
    assert "SECRET" not in os.environ and played(programs, "return").reward == 2.0


def test_a_program_that_dies_leaves_nothing(programs: Programs) -> None:
    played(programs, "fork")
    assert "SIGKILL" in played(programs, "die").error
    until(lambda: not sleepers())
    assert played(programs, "return").reward == 2.0


def test_a_missing_package_names_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import no_such_package\n\nasync def run(*given): ...\n")
    made = Programs(EnvSpec(name="agent.py:run", python=sys.executable), tmp_path)
    with pytest.raises(SpecError, match="No module named 'no_such_package'") as refused:
        made.start()
    assert refused.value.hint.startswith(f"Install it for {sys.executable}, or name an interpreter")
    made.close()
