"""Runs the ranks of one trainer: `python -I -S launch.py CONFIG.json`. Standard library only.

It reads `python`, `ranks`, `first` and `here` of CONFIG. When a rank ends, all others get SIGTERM, then
SIGKILL after _GRACE_SECONDS. They also end with this process, whatever ends it (_PR_SET_PDEATHSIG). It exits
with 0 after SIGTERM and when the first ranks that ended exited with 0.
"""

import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import time

KILLED = "was killed by"

_HEARD = (signal.SIGTERM, signal.SIGCHLD)
_GRACE_SECONDS = 5.0
_EX_EXEC = 127  # the interpreter could not be executed
_PR_SET_PDEATHSIG = 1
_PF_EXITING = 0x4  # a flag in /proc/PID/stat: the kernel is taking the process down

_Ranks = dict[int, "subprocess.Popen[bytes]"]


def main() -> int:
    with open(sys.argv[1], encoding="utf-8") as file:
        config = json.load(file)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)  # they are waited for, none is lost
    command = [config["python"], "-P", "-m", "lorad.trainers.ranks.worker", sys.argv[1]]
    ranks: _Ranks = {}
    first = config["first"]
    world = config["ranks"]
    count = world if config["here"] is None else config["here"]
    end_with_this = functools.partial(_end_with, os.getpid())
    try:
        for rank in range(first, first + count):
            places = {
                "RANK": rank,
                "LOCAL_RANK": rank - first,
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": count,
            }
            environment = os.environ | {name: str(value) for name, value in places.items()}
            ranks[rank] = subprocess.Popen(command, env=environment, preexec_fn=end_with_this)
    except OSError as error:
        _say(f"cannot start {config['python']}: {error.strerror}")
        return _EX_EXEC
    while not _ended(ranks) and signal.sigwait(_HEARD) == signal.SIGCHLD:
        pass  # the first to end are named; none, when a signal asks this process to end
    # a rank that misses another may be gone before the one it misses, whose memory is given back first
    lost = _lost(ranks)
    # the others end too
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in ranks.values():
        process.terminate()
    while len(codes := _ended(ranks)) < len(ranks) and (left := deadline - time.monotonic()) > 0:
        signal.sigtimedwait([signal.SIGCHLD], left)
    codes = {rank: code for rank, code in codes.items() if rank in lost}
    for rank, code in codes.items():
        how = f"{KILLED} {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        _say(f"rank {rank} {how}")
    for process in ranks.values():
        process.kill()
        process.wait()
    return int(any(codes.values()))


def _end_with(launcher: int) -> None:
    """Kill this rank when the launcher dies; called before the rank's program begins."""
    call = ctypes.CDLL(None, use_errno=True).prctl
    call.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    if call(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != launcher:
        os._exit(_EX_EXEC)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _ended(ranks: _Ranks) -> dict[int, int]:
    return {rank: code for rank, process in ranks.items() if (code := process.poll()) is not None}


def _lost(ranks: _Ranks) -> set[int]:
    """Return the ranks that have ended, or are about to: the kernel closes what they had open."""
    lost = set(_ended(ranks))
    for rank in ranks.keys() - lost:
        with open(f"/proc/{ranks[rank].pid}/stat", encoding="utf-8") as file:
            flags = file.read().rpartition(")")[2].split()[6]
        if int(flags) & _PF_EXITING:
            lost.add(rank)
    return lost


def _say(text: str) -> None:
    print(f"lorad: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
