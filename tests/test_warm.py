"""What the warm process forks begins as an interpreter does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lorad.box.paths import AttemptDir
from lorad.children.identity import start_time
from lorad.daemon.process.processes import Processes
from lorad.daemon.process.users import user_of
from tests.kit.passable import PASSABLE, why_not
from tests.kit.warm.processes import WarmProcesses, is_warm
from tests.kit.warm.ranks import interpreter
from tests.kit.world import COLD, world

SIGNALS = """
lines = [line.split() for line in open("/proc/self/status")]
sets = {words[0]: int(words[1], 16) for words in lines if words[0] in ("SigIgn:", "SigBlk:", "SigCgt:")}
print({name: hex(numbers & 0x7FFFFFFF) for name, numbers in sets.items()}, flush=True)
"""


def signals_of(processes: Processes, root: Path) -> bytes:
    """Return which signals a program ignores, blocks and catches that a shim has started."""
    (root / "said.py").write_text(SIGNALS)
    attempt = AttemptDir(root / "attempts" / "0001")
    environment = {"PYTHONPATH": str(root)}
    processes.start(attempt, [sys.executable, "-m", "said"], environment, attempt.root)
    with world(COLD) as waiting:
        waiting.until(lambda: not processes.inspect(attempt).is_up, "the program is over")
    return attempt.log.read_bytes()


@pytest.mark.skipif(not is_warm(), reason="tests run without a warm process")
def test_signals_are_those_of_an_interpreter(tmp_path: Path) -> None:
    warm, cold = tmp_path / "warm", tmp_path / "cold"
    for root in (warm, cold):
        root.mkdir()
    expected = signals_of(Processes(), cold)
    assert b"SigIgn" in expected
    assert signals_of(WarmProcesses(), warm) == expected


RIGHTS = """
import os
kinds = ("Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Umask:")
print(*(line.split() for line in open("/proc/self/status") if line.startswith(kinds)), sep="\\n")
fds = sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2))
print(os.stat("/proc/self/fd").st_uid, sorted(os.environ), os.getcwd(), [os.path.basename(fd) for fd in fds])
"""


def rights_of(processes: Processes, root: Path) -> str:
    """Return what a program of another user may do that a shim has started."""
    attempt = AttemptDir(root / "attempts" / "0001")
    processes.start(attempt, [sys.executable, "-c", RIGHTS], {"SAID": "1"}, Path("/"), user=user_of(4001))
    with world(COLD) as waiting:
        waiting.until(lambda: not processes.inspect(attempt).is_up, "the program is over")
    return attempt.log.read_text()


@pytest.mark.skipif(
    not is_warm() or bool(PASSABLE or why_not()),
    reason="needs root, a warm process, and a Python that others may start",
)
def test_another_user_gets_no_more_rights(tmp_path: Path) -> None:
    expected = rights_of(Processes(), tmp_path / "cold")
    assert "'Uid:', '4001', '4001', '4001', '4001'" in expected and "['NoNewPrivs:', '1']" in expected
    assert rights_of(WarmProcesses(), tmp_path / "warm") == expected


RANK = """
import os, sys, time
print(os.getpid(), oct(os.umask(0)), os.getcwd(), os.environ["RANK"], sys.argv[1:], end=" ")
print("torch" in sys.modules, flush=True)
sys.stdin.read()
sys.exit(3)
"""


def rank_of(root: Path, file: str, python: str) -> subprocess.Popen[str]:
    """One that waits until its input ends."""
    (root / file).write_text(RANK)
    return subprocess.Popen(
        [python, str(root / file), "a b"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, umask=0o027,
        env=os.environ | {"RANK": "1"},
    )  # fmt: skip


@pytest.mark.skipif(not is_warm(), reason="tests run without a warm process")
def test_forked_rank_begins_as_an_interpreters(tmp_path: Path) -> None:
    said = []
    for python in (interpreter(sys.executable), sys.executable):
        with rank_of(tmp_path, "some_rank.py", python) as rank:
            out, _ = rank.communicate("")
        assert rank.returncode == 3
        said.append(out.split()[1:])
    assert said[0] == [*said[1][:-1], "True"] and said[1][-1] == "False"


@pytest.mark.skipif(not is_warm(), reason="tests run without a warm process")
def test_killed_rank_leaves_no_fork(tmp_path: Path) -> None:
    with rank_of(tmp_path, "some_rank.py", interpreter(sys.executable)) as rank, world(COLD) as waiting:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline().split()[0])
        assert pid != rank.pid
        rank.send_signal(signal.SIGKILL)
        waiting.until(lambda: start_time(pid) is None, "the fork is over")


@pytest.mark.skipif(not is_warm(), reason="tests run without a warm process")
def test_signal_that_ends_a_fork_ends_its_caller(tmp_path: Path) -> None:
    with rank_of(tmp_path, "some_rank.py", interpreter(sys.executable)) as rank:
        assert rank.stdout is not None
        os.kill(int(rank.stdout.readline().split()[0]), signal.SIGPROF)
        assert rank.wait() == -signal.SIGPROF


@pytest.mark.skipif(not is_warm(), reason="tests run without a warm process")
def test_other_programs_have_the_interpreter_itself(tmp_path: Path) -> None:
    with rank_of(tmp_path, "other.py", interpreter(sys.executable)) as other:
        assert other.communicate("")[0].split()[0] == str(other.pid) and other.returncode == 3
