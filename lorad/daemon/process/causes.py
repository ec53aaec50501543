"""Say in one sentence why a process ended, and what to do next; `runs/end_clues.py` gathers the clues.

A cause counts as proved by a sign of its own: an error in the process's log, or its pid in the kernel's log.
What only happened meanwhile is named as a possibility.
"""

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from lorad.children.logs import SURVIVED

LAST_LINES = 200  # NCCL's watchdog alone writes a hundred lines
_LAST_CHARACTERS = 1 << 18
_PART = 1000  # characters at either end of a long line


class Clues(NamedTuple):
    """What is known about a process that ended.

    log: the end of what it and its children printed.
    kernel: what the kernel logged while it lived.
    ooms: how much the kernel's count of killed processes grew meanwhile; None where the kernel does not
        count.
    """

    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    log: str = ""
    kernel: Sequence[str] = ()
    ooms: int | None = None


class Diagnosis(NamedTuple):
    """What is wrong, and what to do next."""

    what: str
    advice: str


_HOST_MEMORY = (
    "Let fewer runs and pools work at a time, or take a smaller base or smaller batches "
    "(data.prompts_per_step, trainer.tokens_per_microbatch); then `lorad resume`."
)
_GPU_BROKEN = (
    "`nvidia-smi -q` and `dmesg | grep -i xid` show which GPU; it needs a reset, or the machine a restart, "
    "before runs go there again."
)
_RANKS_LOST = (
    "One rank ended or hung first: its lines in `lorad logs RUN --of trainer` say why; NCCL_DEBUG=INFO in "
    "`env` of the backend in config.yaml shows more."
)

ECC = Diagnosis("a GPU reported an uncorrectable memory error (ECC)", _GPU_BROKEN)
OFF_THE_BUS = Diagnosis("a GPU has fallen off the bus", _GPU_BROKEN)
NCCL_TIME_OUT = Diagnosis("the ranks waited for each other until NCCL's time-out", _RANKS_LOST)
NCCL_ERROR = Diagnosis("NCCL lost the connection between ranks", _RANKS_LOST)
CUDA_MEMORY = Diagnosis(
    "a GPU ran out of memory",
    "Lower trainer.tokens_per_microbatch, pool.memory_fraction or algorithm.group_size, set "
    "trainer.activation_checkpointing=true, or take more GPUs; then `lorad resume` with that.",
)
CUDA_FAULT = Diagnosis(
    "a computation on a GPU failed",
    "Resume it; if it fails at the same step again, CUDA_LAUNCH_BLOCKING=1 in `env` of the backend in "
    "config.yaml shows where, and `dmesg | grep -i xid` whether the GPU is to blame.",
)
SHARED_MEMORY = Diagnosis(
    "shared memory (/dev/shm) is full",
    "Remove what lies in /dev/shm, or make it larger (in a container: --shm-size, --ipc=host); then `lorad "
    "resume`.",
)
DISK_FULL = Diagnosis(
    "no space is left on a disk",
    "`lorad gc` deletes what nothing needs, `df -h` shows which disk it is; then `lorad resume`.",
)
QUOTA = Diagnosis(
    "the disk quota is used up",
    "Delete something or ask for more, `lorad gc` deletes what nothing needs; then `lorad resume`.",
)
BUS_ERROR = SHARED_MEMORY._replace(what="a bus error: most often /dev/shm is full")
MEMORY = Diagnosis("it did not get the memory that it asked this machine for", _HOST_MEMORY)
KILLED_FOR_MEMORY = Diagnosis("killed by the kernel: the machine ran out of memory", _HOST_MEMORY)
CHILD_KILLED_FOR_MEMORY = Diagnosis(
    "the kernel killed a process of it: the machine ran out of memory", _HOST_MEMORY
)
MAYBE_KILLED_FOR_MEMORY = Diagnosis(
    "killed, perhaps by the kernel: the machine ran out of memory meanwhile", _HOST_MEMORY
)
CHILD_MAYBE_KILLED_FOR_MEMORY = Diagnosis(
    "a process of it was killed, perhaps by the kernel: the machine ran out of memory meanwhile", _HOST_MEMORY
)
FILES = Diagnosis(
    "too many files are open", "Raise the limit (`ulimit -n`), start the daemon again, `lorad resume`."
)
PROCESSES = Diagnosis(
    "no process or thread can be started: its user, or the control group, has as many as are allowed",
    "End some, or raise the limit (`ulimit -u`, pids.max); then `lorad resume`.",
)
GPU_BUSY = Diagnosis(
    "a GPU was busy or not to be had",
    "`nvidia-smi` shows who has it, `nvidia-smi -q -d COMPUTE` whether only one process may; then `lorad "
    "resume`.",
)

# What is more certain comes first. `^(?>.*?A).*B` finds A and B in one line, in time linear in its length.
_SIGNS = [
    (re.compile(pattern, re.MULTILINE), diagnosis)
    for pattern, diagnosis in (
        (r"(?i)uncorrectable ECC error|CUDA_ERROR_ECC_UNCORRECTABLE|cudaErrorECCUncorrectable", ECC),
        (r"(?i)fallen off the bus|GPU is lost", OFF_THE_BUS),
        (r"(?i)cudaErrorDevicesUnavailable|device\(s\) is/are busy or unavailable", GPU_BUSY),
        (
            r"CUDA out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|OutOfMemoryError: CUDA",
            CUDA_MEMORY,
        ),
        (r"cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|torch\.OutOfMemoryError", CUDA_MEMORY),
        (r"^(?>.*?No space left on device).*/dev/shm|^(?>.*?/dev/shm).*No space left", SHARED_MEMORY),
        (r"insufficient shared memory", BUS_ERROR),
        (r"unable to (?:write to|resize|allocate shared memory for) file </torch_", SHARED_MEMORY),
        (r"No space left on device|ENOSPC|\[Errno 28\]|database or disk is full", DISK_FULL),
        (r"Disk quota exceeded|\[Errno 122\]", QUOTA),
        (r"Cannot allocate memory|\[Errno 12\]|std::bad_alloc|(?m:^MemoryError)", MEMORY),
        (r"DefaultCPUAllocator: (?:can't|not enough)|^(?>.*?Unable to allocate \d).* for an array", MEMORY),
        (
            r"Watchdog caught collective operation timeout"
            r"|^(?>.*?NCCL).*(?:timed out|[Tt]ime-?out (?:after|at|reached|waiting|while))",
            NCCL_TIME_OUT,
        ),
        (r"ncclSystemError|ncclRemoteError|ncclInternalError|ncclUnhandledCudaError|NCCL error", NCCL_ERROR),
        (r"Too many open files(?! in system)|\[Errno 24\]", FILES),
        (r"can't start new thread|pthread_create failed|(?m:^BlockingIOError: \[Errno 11\])", PROCESSES),
        (r"^lorad: cannot start .*\[Errno 11\]", PROCESSES),
        (
            r"CUDA error: (?:an illegal|unspecified launch|device-side|misaligned)|cudaErrorLaunchFailure",
            CUDA_FAULT,
        ),
    )
]
# Limits that give the same errors when they are used up.
_OTHER_LIMITS = re.compile(r"inotify|file watchers|\bibv_|locked memory")
_XID = re.compile(r"NVRM: Xid \((?P<where>[^)]*)\): (?P<number>\d+)(?:, pid=(?P<pid>\d+))?")
_ECC_XIDS = {48, 63, 64, 92, 94, 95}
_PROGRAM_XIDS = {13, 31, 43}  # the program went wrong, not the GPU
_OOM_KILL = re.compile(r"Killed process (\d+)")
_KILLED_CHILD = re.compile(r"SIGKILL|signal 9\b|exit ?code:? -9\b|exited with (?:code )?(?:-9|137)\b")


def diagnose(clues: Clues) -> Diagnosis | None:
    """Find the cause of an end that was not asked for; None when only the exit itself is known.

    The kernel logs the pid that it killed for want of memory; without such a line, it may have killed any
    process of the machine. NVIDIA's driver logs GPU errors there by their number (Xid): where the process had
    no error on a GPU, and its pid is not named, the GPU may be somebody else's.
    """
    killed = {int(match[1]) for line in clues.kernel if (match := _OOM_KILL.search(line))}
    text = _last_lines(clues.log)
    if clues.signal == signal.SIGKILL and clues.pid in killed:
        return KILLED_FOR_MEMORY
    if clues.signal == signal.SIGKILL and clues.ooms and not killed:
        return MAYBE_KILLED_FOR_MEMORY
    if clues.signal != signal.SIGKILL and (killed or clues.ooms) and _KILLED_CHILD.search(text):
        is_named = any(re.search(rf"\b{pid}\b", text) for pid in killed)
        return CHILD_KILLED_FOR_MEMORY if is_named else CHILD_MAYBE_KILLED_FOR_MEMORY
    in_log = in_words_of(clues.log)
    errors = [match for line in clues.kernel if (match := _XID.search(line))]
    if errors and in_log in (None, CUDA_FAULT, NCCL_TIME_OUT, NCCL_ERROR):  # these may only follow from it
        number = int(errors[-1]["number"])
        trouble = "a GPU reported an error"
        if number in _ECC_XIDS or number == 79:
            trouble = ECC.what if number in _ECC_XIDS else OFF_THE_BUS.what
        if in_log is None and errors[-1]["pid"] != str(clues.pid):
            trouble = f"it may be that {trouble}"
        advice = CUDA_FAULT.advice if number in _PROGRAM_XIDS else _GPU_BROKEN
        return Diagnosis(f"{trouble}: Xid {number} at {errors[-1]['where']}", advice)
    return in_log or (BUS_ERROR if clues.signal == signal.SIGBUS else None)


def in_words_of(text: str) -> Diagnosis | None:
    """Recognise a known cause in the last lines of a log or in a driver's message."""
    lines = _last_lines(text).split("\n")
    text = "\n".join(line for line in lines if not (SURVIVED.search(line) or _OTHER_LIMITS.search(line)))
    return next((diagnosis for pattern, diagnosis in _SIGNS if pattern.search(text)), None)


def _last_lines(text: str) -> str:
    """Keep the last lines, and both ends of long ones, as user code prints them."""
    lines = text[-_LAST_CHARACTERS:].splitlines()[-LAST_LINES:]
    return "\n".join(
        line if len(line) <= 2 * _PART else f"{line[:_PART]} … {line[-_PART:]}" for line in lines
    )
