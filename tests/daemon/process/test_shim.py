"""The shim records one process life to its end, whatever dies."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorad.children.identity import Identity
from lorad.daemon.process import shim
from lorad.daemon.process.processes import SHIM, child_of


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


def prepare(root: Path, code: str, **command: Any) -> Path:
    root.mkdir(exist_ok=True)
    argv = [sys.executable, "-c", code]
    (root / "command.json").write_text(json.dumps({"argv": argv, "env": {}, "cwd": str(root)} | command))
    return root


def launch(root: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*SHIM, str(root)], stderr=subprocess.DEVNULL)


def status(root: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((root / "status.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found


def test_exit_code_and_output_are_kept(tmp_path: Path) -> None:
    root = prepare(
        tmp_path, "import os; print(os.environ['A'], os.getcwd()); raise SystemExit(37)", env={"A": "b"}
    )
    assert launch(root).wait() == 0
    assert (status(root)["exit_code"], status(root)["signal"]) == (37, None)
    assert (root / "log").read_text() == f"b {tmp_path}\n"


def test_a_killing_signal_is_kept(tmp_path: Path) -> None:
    root = prepare(tmp_path, "import os; os.kill(os.getpid(), 9)")
    launch(root).wait()
    assert (status(root)["exit_code"], status(root)["signal"]) == (None, signal.SIGKILL)


def test_child_is_known_by_pid_start_and_boot(tmp_path: Path) -> None:
    root = prepare(tmp_path, "import time; time.sleep(60)")
    process = launch(root)
    found = wait_for(lambda: status(root))
    assert child_of(found) == Identity.of(found["pid"]) and child_of(found).is_alive
    assert not child_of(found | {"start_time": found["start_time"] + 1}).is_alive
    assert not child_of(found | {"boot_id": "another boot"}).is_alive
    process.terminate()
    process.wait()


def test_forwarded_sigterm_lets_the_child_end_itself(tmp_path: Path) -> None:
    code = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(5)); print('on', flush=True); "
        "signal.pause()"
    )
    process = launch(prepare(tmp_path, code))
    wait_for(lambda: (tmp_path / "log").exists() and "on" in (tmp_path / "log").read_text())
    process.terminate()
    process.wait()
    assert status(tmp_path)["exit_code"] == 5


def test_second_shim_starts_nothing_beside_the_first(tmp_path: Path) -> None:
    first = launch(prepare(tmp_path, "import time; print('on', flush=True); time.sleep(60)"))
    wait_for(lambda: status(tmp_path))
    assert launch(tmp_path).wait() == shim.EX_LOCKED
    first.terminate()
    first.wait()


def test_second_shim_starts_nothing_beside_orphaned_child(tmp_path: Path) -> None:
    first = launch(prepare(tmp_path, "import time; print('on', flush=True); time.sleep(60)"))
    wait_for(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text())
    first.kill()
    first.wait()
    assert launch(tmp_path).wait() == shim.EX_LOCKED
    os.kill(status(tmp_path)["pid"], signal.SIGKILL)


def test_a_directory_is_used_only_once(tmp_path: Path) -> None:
    root = prepare(tmp_path, "print('once')")
    launch(root).wait()
    assert launch(root).wait() == shim.EX_USED
    assert (root / "log").read_text() == "once\n"


def test_ten_shims_at_once_start_one_process(tmp_path: Path) -> None:
    root = prepare(tmp_path, "import time; print('one', flush=True); time.sleep(0.5)")
    assert sorted(process.wait() for process in [launch(root) for _ in range(10)])[0] == 0
    assert (root / "log").read_text() == "one\n"


def test_group_of_a_process_dies_with_it(tmp_path: Path) -> None:
    code = "import subprocess as s; p = s.Popen(['sleep', '60']); print(p.pid, flush=True)"
    launch(prepare(tmp_path, code)).wait()
    left = int((tmp_path / "log").read_text())
    wait_for(lambda: not Path(f"/proc/{left}").exists() or b"Z" in Path(f"/proc/{left}/stat").read_bytes())


def test_ends_all_kills_other_sessions_too(tmp_path: Path) -> None:
    away = "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
    away += "print(os.getpid(), flush=True); time.sleep(60)"
    code = f"import subprocess as s, sys; s.run([sys.executable, '-c', {away!r}])\n"
    code += "import os\nwhile not os.path.getsize('log'): pass"
    launch(prepare(tmp_path, code, ends_all=True)).wait()
    assert status(tmp_path)["exit_code"] == 0
    assert not Path(f"/proc/{(tmp_path / 'log').read_text().strip()}").exists()


def test_orphans_of_a_process_are_reaped(tmp_path: Path) -> None:
    orphan = "import os\nif not os.fork(): os._exit(0)"
    code = f"import subprocess as s, sys; [s.run([sys.executable, '-c', {orphan!r}]) for _ in range(5)]\n"
    code += "import os, time\nshim = os.getppid()\n"
    code += "def children(): return open(f'/proc/{shim}/task/{shim}/children').read().split()\n"
    code += "while children() != [str(os.getpid())]: time.sleep(0.01)"
    launch(prepare(tmp_path, code, ends_all=True)).wait(timeout=60)
    assert status(tmp_path)["exit_code"] == 0


def test_a_program_that_does_not_exist_says_so(tmp_path: Path) -> None:
    launch(prepare(tmp_path, "", argv=["/nonexistent/program"])).wait()
    assert status(tmp_path)["exit_code"] == shim.EX_EXEC
    assert "/nonexistent/program" in (tmp_path / "log").read_text()


def test_a_taken_device_lock_starts_nothing(tmp_path: Path) -> None:
    lock = str(tmp_path / "device.lock")
    first = launch(prepare(tmp_path / "a", "import time; time.sleep(60)", locks=[lock]))
    wait_for(lambda: status(tmp_path / "a"))
    assert launch(prepare(tmp_path / "b", "print('never')", locks=[lock])).wait() == shim.EX_LOCKED
    assert status(tmp_path / "b")["locked"] and status(tmp_path / "b")["pid"] is None
    first.terminate()
    first.wait()


def test_device_locks_are_free_before_the_end(tmp_path: Path) -> None:
    lock = tmp_path / "device.lock"
    prepare(tmp_path / "a", "", locks=[str(lock)])
    look = "open(sys.argv[1] + '/seen', 'w').write(str(shim._take_lock(LOCK) is not None))"
    code = (
        f"import sys; from lorad.daemon.process import shim; LOCK = {str(lock)!r}; "
        f"shim.overwrite = lambda fd, status: {look}; sys.exit(shim.main())"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")]).returncode == 0
    assert (tmp_path / "a" / "seen").read_text() == "True"


def test_final_status_overwrites_the_first_in_place(tmp_path: Path) -> None:
    code = "import os; print(os.stat('status.json').st_ino, os.stat('status.json').st_size)"
    launch(prepare(tmp_path, code)).wait()
    stat = (tmp_path / "status.json").stat()
    assert (tmp_path / "log").read_text().split() == [str(stat.st_ino), str(stat.st_size)]


def test_descendants_carry_the_name_of_the_attempt(tmp_path: Path) -> None:
    code = "import subprocess as s; s.run(['printenv', 'LORAD_ATTEMPT'])"
    launch(prepare(tmp_path, code, env={"LORAD_ATTEMPT": "of the daemon's own"})).wait()
    assert (tmp_path / "log").read_text() == f"{tmp_path}\n"


def test_oom_kills_are_counted_before_and_after(tmp_path: Path) -> None:
    launch(prepare(tmp_path, "")).wait()
    found = status(tmp_path)
    assert found["oom_before"] == shim.oom_kills() == found["oom_after"]


def test_its_length_is_by_a_steady_clock(tmp_path: Path) -> None:
    launch(prepare(tmp_path, "import time; time.sleep(0.2)")).wait()
    assert 0.2 <= status(tmp_path)["lived"] < 600


def test_the_largest_status_fits_into_its_bytes() -> None:
    largest = dict.fromkeys((*shim.born(os.getpid()), *shim.died(0, 1.0)), 2**63) | {
        "boot_id": shim.boot_id()
    }
    assert len(shim.padded(largest)) == shim.STATUS_BYTES


def test_starting_the_shim_loads_few_modules() -> None:
    code = (
        f"import sys; before = set(sys.modules); exec(open({shim.__file__!r}).read(), {{'__name__': 'shim'}})"
    )
    report = "; print(*{'typing', 'subprocess', 'asyncio', 'tempfile'} & (set(sys.modules) - before))"
    command = [sys.executable, "-I", "-S", "-c", code + report]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == ""


def test_shim_waits_lock_seconds_for_device_lock(tmp_path: Path) -> None:
    lock = tmp_path / "device.lock"
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = launch(prepare(tmp_path / "a", "print('at last')", locks=[str(lock)], lock_seconds=60))
        wait_for((tmp_path / "a" / "log").exists)
        assert process.poll() is None and status(tmp_path / "a") == {}
    assert process.wait() == 0
    assert (tmp_path / "a" / "log").read_text() == "at last\n"
