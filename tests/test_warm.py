"""What the warm process forks begins as an interpreter does."""

import sys
from pathlib import Path

import pytest

from lorad.box.paths import AttemptDir
from lorad.daemon.process.processes import Processes
from tests.kit.warm.processes import WarmProcesses, is_warm
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
