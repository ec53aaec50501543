"""Two threads that decode a Struct for the first time at the same moment: msgspec ends the process, lorad
does not.
"""

import subprocess
import sys

import msgspec
import pytest

import lorad.daemon.daemon
import lorad.driver.__main__  # noqa: F401
from lorad.protocol.structs import learn_structs

RACE = """
import sys, threading, types
import msgspec
from lorad.protocol.structs import learn_structs, with_decoder

MODULE = '''
from __future__ import annotations
import msgspec
class Inner(msgspec.Struct):
    x: int
    y: dict[str, int]
class Outer(msgspec.Struct):
    inner: Inner
    several: list[Inner]
'''
DATA = b'{"inner": {"x": 1, "y": {}}, "several": [{"x": 1, "y": {}}]}'
outers = []
for number in range(300):
    module = types.ModuleType(f"lorad.of_a_test_{number}")
    sys.modules[module.__name__] = module
    exec(MODULE, module.__dict__)
    outers.append(module.Outer)
if sys.argv[1] == "at start":
    assert learn_structs() >= 600
barrier = threading.Barrier(4)
sys.setswitchinterval(1e-6)

def decode():
    for outer in outers:
        barrier.wait()
        msgspec.json.decode(DATA, type=with_decoder(outer) if sys.argv[1] == "by each" else outer)

threads = [threading.Thread(target=decode) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def race(how: str) -> int:
    return subprocess.run([sys.executable, "-c", RACE, how], timeout=120, check=False).returncode


@pytest.mark.parametrize("how", ["at start", "by each"])
def test_structs_learnt_before_threads_crash_nothing(how: str) -> None:
    """All are learnt at the start, or each thread learns what it is about to decode, as the client does."""
    assert race(how) == 0


def test_msgspec_still_needs_it() -> None:
    """If this fails, msgspec has mended it, and `learn_structs` may go where that version is required."""
    if any(race("new") == 0 for _ in range(2)):
        pytest.skip(f"msgspec {msgspec.__version__} may do without")


def test_every_struct_of_lorad_can_be_learnt() -> None:
    assert learn_structs() > 100
