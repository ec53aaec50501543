"""A child process runs under a guard that reports its end and leaves nothing of it behind, whichever process
dies.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorad.children.identity import boot_id, start_time
from lorad.children.leftovers import LOCK, clean_leftovers, living, places
from lorad.children.process import Child, Life, sweep
from tests.kit.leftovers import kill_leftovers

ROOT = Path(__file__).resolve().parents[2]
PYTHON = [sys.executable, "-I", "-S", "-c"]
CLEAN = [sys.executable, "-m", "lorad.children.leftovers"]
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
# A child, its child and its grandchild, each in a session of its own and saying its pid. {0} is run by the
# child, {1} by its descendants.
FAMILY = """
import os, signal, time
{0}
for member in range(3):
    print(os.getpid(), flush=True)
    if member == 2 or os.fork():
        break
    os.setsid()
    {1}
time.sleep(600)
"""
POOL = """
import asyncio, sys
from pathlib import Path
from lorad.children.process import Child

async def main():
    here = Path(sys.argv[1])
    await Child(sys.argv[2:], {}, here / "log", here / "record", here).start()
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _nothing_outlives_a_failed_test(home: Path) -> Iterator[None]:
    yield
    kill_leftovers(home)


def child(root: Path, code: str, **env: str) -> Child:
    return Child([*PYTHON, code], env, root / "log", root / "record", root)


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


def family(root: Path) -> list[int]:
    """The three pids of FAMILY, once all of them have been said."""
    said = wait_for(lambda: (text := (root / "log").read_text()).count("\n") == 3 and text)
    return [int(word) for word in said.split()]


def lives(pid: int) -> bool:
    return start_time(pid) is not None


def in_process_table(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def guard_pid(root: Path) -> int:
    return int(json.loads((root / "record").read_bytes())["guard_pid"])


def pool_with(root: Path, code: str) -> subprocess.Popen[bytes]:
    """A pool in a process of its own that runs one child, once that is up."""
    pool = subprocess.Popen([sys.executable, "-c", POOL, str(root), *PYTHON, code], cwd=ROOT)
    wait_for((root / "record").exists)
    return pool


@contextlib.contextmanager
def holding(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.set_inheritable(file.fileno(), True)
        yield


def is_free(path: Path) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


async def test_stop_kills_a_stubborn_child_and_its_sessions(tmp_path: Path) -> None:
    process = child(tmp_path, FAMILY.format(STUBBORN, ""))
    await process.start()
    pids, watcher = await asyncio.to_thread(family, tmp_path), guard_pid(tmp_path)
    assert process.pid == pids[0] and all(map(lives, pids))
    await process.stop(grace=0.1)
    assert not any(map(lives, pids)) and not in_process_table(watcher)
    assert not process.is_alive and not process.record.exists()
    assert await process.ended() == "was killed by SIGKILL"


async def test_obedient_child_has_time_to_end(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print('bye'))); print('up', "
        "flush=True)"
    )
    process = child(tmp_path, f"{code}; time.sleep(600)")
    await process.start()
    await asyncio.to_thread(wait_for, process.output.tail)
    await process.stop()
    assert (await process.ended(), process.output.tail()) == ("exited with code 0", "up\nbye")


async def test_children_may_clean_up_after_the_child(tmp_path: Path) -> None:
    code = "import os, time\nchild = os.getpid()\nif os.fork(): os._exit(4)\n"
    code += "while os.getppid() == child: time.sleep(0.001)\ntime.sleep(0.2)\nopen('cleaned', 'w')"
    process = child(tmp_path, code)
    await process.start()
    assert await process.ended() == "exited with code 4"
    assert (tmp_path / "cleaned").exists()


async def test_killed_child_wakes_all_waiters_without_leftovers(tmp_path: Path) -> None:
    process = child(tmp_path, FAMILY.format("", STUBBORN))
    await process.start()
    pids = await asyncio.to_thread(family, tmp_path)
    waiting = [asyncio.create_task(process.ended()) for _ in range(3)]
    os.kill(pids[0], signal.SIGKILL)
    assert await asyncio.gather(*waiting) == ["was killed by SIGKILL"] * 3
    assert not any(map(lives, pids))


async def test_cancelled_waiter_leaves_the_child_alive(tmp_path: Path) -> None:
    process = child(tmp_path, "import time; time.sleep(600)")
    await process.start()
    impatient = asyncio.create_task(process.ended())
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    assert process.is_alive
    await process.stop()
    assert await process.ended() == "was killed by SIGTERM"


async def test_tail_and_exit_code_are_of_this_life(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of an earlier life\n")
    process = child(tmp_path, "import sys; print('one\\n\\n  two', flush=True); sys.exit('no memory')")
    await process.start()
    assert await process.ended() == "exited with code 1"
    assert (process.output.tail(), process.output.tail(1)) == ("one\n  two\nno memory", "no memory")
    assert (tmp_path / "log").read_text().startswith("of an earlier life\n")


async def test_missing_program_is_reported_in_the_log(tmp_path: Path) -> None:
    process = Child(["/no/python"], {}, tmp_path / "log", tmp_path / "record", tmp_path)
    await process.start()
    assert await process.ended() == "exited with code 127"
    assert "cannot start /no/python: " in process.output.tail()


async def test_child_inherits_no_descriptors_of_the_pool(
    tmp_path: Path,
) -> None:
    """It has its own folder, umask and environment, and the signal handling of a fresh Python."""
    code = """
import json, os, signal
fds = {fd: os.readlink(f'/proc/self/fd/{fd}') for fd in range(64) if os.path.exists(f'/proc/self/fd/{fd}')}
os.mkdir('made')
with open('/proc/self/status') as file: ignored = next(line for line in file if line.startswith('SigIgn'))
signals = [n for n in range(1, 32) if int(ignored.split()[1], 16) >> n - 1 & 1]
print(json.dumps([fds, os.getcwd(), os.environ['A'], os.environ['LORAD_HOME'], signals]))
"""
    leak = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(leak, True)
    process = child(tmp_path, code, A="b")
    await process.start()
    os.close(leak)
    assert await process.ended() == "exited with code 0", process.output.tail()
    log, python = str(tmp_path / "log"), [signal.SIGPIPE, signal.SIGXFSZ]  # which Python itself ignores
    assert json.loads(process.output.tail()) == [
        {"0": os.devnull, "1": log, "2": log},
        str(tmp_path),
        "b",
        os.environ["LORAD_HOME"],
        python,  # what Python itself ignores
    ]
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("made", "log")] == [0o700, 0o600]


async def test_terminal_signals_to_the_guard_end_nothing(tmp_path: Path) -> None:
    process = child(tmp_path, "import time; print('up', flush=True); time.sleep(600)")
    await process.start()
    await asyncio.to_thread(wait_for, process.output.tail)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        os.kill(guard_pid(tmp_path), number)
    await process.stop()
    assert await process.ended() == "was killed by SIGTERM"


async def test_killed_guard_takes_the_child_and_its_sessions(tmp_path: Path) -> None:
    process = child(tmp_path, FAMILY.format(STUBBORN, ""))
    await process.start()
    pids = await asyncio.to_thread(family, tmp_path)
    os.kill(guard_pid(tmp_path), signal.SIGKILL)
    assert await process.ended() == "was killed with its guard, by SIGKILL"
    assert not any(map(lives, pids))


async def test_end_waits_for_a_child_that_is_ending(tmp_path: Path) -> None:
    """One whose files the kernel has closed already, but not freed."""
    code = "import os, time; big = os.memfd_create('big'); [os.write(big, bytes(1 << 24)) for _ in range(32)]"
    process = child(tmp_path, f"{code}; print('up', flush=True); time.sleep(600)")
    await process.start()
    await asyncio.to_thread(wait_for, process.output.tail)
    os.kill(guard_pid(tmp_path), signal.SIGKILL)
    await process.ended()
    assert process.pid is not None and not lives(process.pid)


async def test_stopped_guard_cannot_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.children.process.KILL_SECONDS", 1.0)
    process = child(tmp_path, FAMILY.format(STUBBORN, ""))
    await process.start()
    pids = await asyncio.to_thread(family, tmp_path)
    os.kill(guard_pid(tmp_path), signal.SIGSTOP)
    await process.stop(grace=0.1)
    assert not any(map(lives, pids))


def test_a_killed_pool_leaves_nothing_behind(tmp_path: Path) -> None:
    pool = pool_with(tmp_path, FAMILY.format("", STUBBORN))
    pids = [*family(tmp_path), guard_pid(tmp_path)]
    kill(pool)
    wait_for(lambda: not any(map(lives, pids)))


def test_sweep_ends_what_a_killed_pool_left(tmp_path: Path) -> None:
    pool = pool_with(tmp_path, FAMILY.format(STUBBORN, ""))
    pids = [*family(tmp_path), guard_pid(tmp_path)]
    kill(pool)
    assert sweep(tmp_path / "record")
    assert not any(map(lives, pids)) and not (tmp_path / "record").exists()
    assert not sweep(tmp_path / "record")


def test_sweep_finds_leftovers_of_a_killed_guard(tmp_path: Path) -> None:
    pool = pool_with(tmp_path, FAMILY.format(STUBBORN, ""))
    pids, watcher = family(tmp_path), guard_pid(tmp_path)
    kill(pool)
    os.kill(watcher, signal.SIGKILL)
    wait_for(lambda: not lives(pids[0]))  # the child itself goes at once, the rest does not
    assert sweep(tmp_path / "record")
    assert not any(map(lives, pids))


def test_sweep_spares_a_process_with_a_reused_pid(tmp_path: Path) -> None:
    innocent = subprocess.Popen(["sleep", "600"])
    began = start_time(innocent.pid)
    assert began is not None
    for life in (
        Life(innocent.pid, began + 1, boot_id(), str(tmp_path / "log")),
        Life(innocent.pid, began, "another boot", str(tmp_path / "log")),
    ):
        (tmp_path / "record").write_text(
            json.dumps({name: getattr(life, name) for name in life.__struct_fields__})
        )
        assert not sweep(tmp_path / "record")
        assert innocent.poll() is None
    kill(innocent)


def test_leftovers_of_a_killed_pool_hold_its_device(tmp_path: Path) -> None:
    (device := tmp_path / "GPU-0.lock").touch()
    command = [sys.executable, "-c", POOL, str(tmp_path), *PYTHON, FAMILY.format(STUBBORN, "")]
    with holding(device), holding(tmp_path / "lock"):
        pool = subprocess.Popen(command, cwd=ROOT, close_fds=False)  # as the shim starts one
        wait_for((tmp_path / "record").exists)
    pids = family(tmp_path)
    kill(pool)
    assert lives(pids[0]) and not is_free(device) and is_free(tmp_path / "lock")
    assert all("GPU-0" not in os.readlink(path) for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir())
    assert sweep(tmp_path / "record")
    wait_for(lambda: is_free(device))
    assert not any(map(lives, pids))


def test_leftovers_are_cleaned_unless_a_new_life_began(tmp_path: Path) -> None:
    pool = pool_with(tmp_path, FAMILY.format(STUBBORN, ""))
    (tmp_path / "record").rename(tmp_path / "engine-0.json")
    pids, left = family(tmp_path), places(tmp_path)
    for directory in left:
        directory.mkdir()
        (directory / "0.sock").touch()
    kill(pool)
    with living(tmp_path):
        assert not clean_leftovers(tmp_path)
    assert all(directory.exists() for directory in left) and len(left) == 5
    assert subprocess.call([*CLEAN, str(tmp_path)], cwd=ROOT) == 0
    assert not any(map(lives, pids)) and not any(
        path.exists() for path in [*left, tmp_path / "engine-0.json"]
    )
    assert clean_leftovers(tmp_path) and not clean_leftovers(tmp_path / "absent")


def test_new_life_waits_for_the_cleaning(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from lorad.children.leftovers import living\n"
    code += "print('here', flush=True)\nwith living(Path(sys.argv[1])): print('up')"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with holding(tmp_path / LOCK):
        life = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert life.stdout is not None and life.stdout.readline() == b"here\n"
        with pytest.raises(subprocess.TimeoutExpired):
            life.wait(0.3)
    assert life.communicate()[0] == b"up\n"


def test_a_record_that_cannot_be_read_sweeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "record").write_text("{")
    assert not sweep(tmp_path / "record") and not sweep(tmp_path / "absent")
