"""Who ended a trainer is named, whichever of its processes is gone first."""

import json
import subprocess
import sys
from pathlib import Path
from platform import machine

import pytest

from lorad.trainers.ranks import launch
from lorad.trainers.ranks.processes import ending

LEAVES_SLOWLY = """#!{python}
import ctypes, os, signal, threading, time
from pathlib import Path

here = Path({here!r})
number = int(os.environ["RANK"])
(here / f"{{number}}.part").write_text(str(os.getpid()))
(here / f"{{number}}.part").rename(here / str(number))
while not (here / str(1 - number)).exists():
    time.sleep(0.01)
other = int((here / str(1 - number)).read_text())


def flags(pid):
    return int(Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[6])


def end_after_the_other():
    while Path(f"/proc/{{other}}").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


if number:  # the kernel is taking it down, with no ear for signals, until the other rank is gone
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=end_after_the_other).start()
    ctypes.CDLL(None).syscall({exit}, 0)
while not flags(other) & 0x4:
    time.sleep(0.01)
os._exit(1)
"""
EXIT = {"x86_64": 60, "aarch64": 93}  # the number of the system call that ends one thread


def test_rank_that_leaves_slowly_is_named(tmp_path: Path) -> None:
    script = tmp_path / "rank"
    script.write_text(LEAVES_SLOWLY.format(python=sys.executable, here=str(tmp_path), exit=EXIT[machine()]))
    script.chmod(0o700)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"python": str(script), "ranks": 2, "first": 0, "here": None}))
    command = [sys.executable, "-I", "-S", launch.__file__, str(config)]
    launcher = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = launcher.stderr.splitlines()
    assert said == ["lorad: rank 0 exited with code 1", "lorad: rank 1 was killed by SIGKILL"]
    assert ending(said, "exited with code 1") == "rank 1 was killed by SIGKILL"


FAILED = ["lorad: rank 1 failed", "Traceback (most recent call last):", "RuntimeError: the middle of a call"]
WENT_ALONG = ["lorad: rank 0 failed", "Traceback (most recent call last):", "RuntimeError: closed by peer"]
EXITS = [f"lorad: rank {rank} exited with code 1" for rank in (0, 1)]
NAMED = "rank 1 exited with code 1; its log: RuntimeError: the middle of a call"


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        pytest.param([*FAILED, *WENT_ALONG, *EXITS], NAMED, id="of all that exited, who failed first"),
        pytest.param(
            [*FAILED, *WENT_ALONG, EXITS[0]], NAMED.replace("exited with code 1", "failed"), id="not gone yet"
        ),
        pytest.param(
            [f"h1: {line}" for line in (*FAILED, EXITS[1])],
            NAMED.replace("; its log: ", " on h1; its log: h1: "),
            id="on another machine",
        ),
        pytest.param(
            ["rank 7", "killed: no space"], "it ended; its log: rank 7\nkilled: no space", id="none"
        ),
        pytest.param([], "it ended", id="an empty log"),
    ],
)
def test_rank_that_failed_first_is_named(lines: list[str], named: str) -> None:
    assert ending(lines, "ended") == named
