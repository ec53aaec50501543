"""Ends become reasons with advice."""

import signal

import pytest

from lorad.children.process import cause
from lorad.daemon.process.causes import (
    BUS_ERROR,
    CHILD_KILLED_FOR_MEMORY,
    CHILD_MAYBE_KILLED_FOR_MEMORY,
    CUDA_FAULT,
    CUDA_MEMORY,
    DISK_FULL,
    ECC,
    FILES,
    GPU_BUSY,
    KILLED_FOR_MEMORY,
    LAST_LINES,
    MAYBE_KILLED_FOR_MEMORY,
    MEMORY,
    NCCL_ERROR,
    NCCL_TIME_OUT,
    OFF_THE_BUS,
    PROCESSES,
    QUOTA,
    SHARED_MEMORY,
    Clues,
    Diagnosis,
    diagnose,
    in_words_of,
)

SAID = {  # as the programs print it
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total": CUDA_MEMORY,
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": CUDA_MEMORY,
    "[rank1]: [PG 0 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7": NCCL_TIME_OUT,
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process "
    "exited": NCCL_ERROR,
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": ECC,
    "Unable to determine the device handle for GPU0: 0000:3B:00.0: GPU is lost. Reboot": OFF_THE_BUS,
    "OSError: [Errno 28] No space left on device: 'versions/000002'": DISK_FULL,
    "RuntimeError: unable to write to file </torch_4711_1>: No space left on device (28)": SHARED_MEMORY,
    "OSError: [Errno 122] Disk quota exceeded": QUOTA,
    "OSError: [Errno 12] Cannot allocate memory": MEMORY,
    "Traceback (most recent call last):\nMemoryError": MEMORY,
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you "
    "tried": MEMORY,
    "RuntimeError: CUDA error: an illegal memory access was encountered": CUDA_FAULT,
    "OSError: [Errno 24] Too many open files: '/dev/null'": FILES,
    "RuntimeError: can't start new thread": PROCESSES,
    "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2": PROCESSES,
    "BlockingIOError: [Errno 11] Resource temporarily unavailable": PROCESSES,
    "lorad: cannot start ['python'] as user 4001: [Errno 11] Resource temporarily unavailable": PROCESSES,
    "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable": GPU_BUSY,
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared "
    "memory (shm).": BUS_ERROR,
    "(EngineCore_0 pid=71) ERROR 11-28 19:08:15 [core.py:710] torch.OutOfMemoryError: CUDA out of "
    "memory. Tried to allocate 2.00 GiB. See NCCL_DEBUG=INFO": CUDA_MEMORY,
}
ULIMIT = (
    "(APIServer pid=927159) WARNING 11-28 19:08:15 [system_utils.py:222] Found ulimit of 1024 and failed to "
    "automatically increase with error current limit exceeds maximum limit. This can cause fd limit errors "
    "like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n"
)
NO_SIGNS = (  # as programs print them, or in their form
    ULIMIT,
    ULIMIT.partition("] ")[2],  # as SGLang has it, whose lines have no level
    "2026-11-27 12:52:03,652 WARNING lorad.box.ran_out: new connections wait: [Errno 24] Too many open files",
    "OSError: [Errno 24] inotify instance limit reached",
    "OSError: [Errno 23] Too many open files in system",
    "OSError: [Errno 28] inotify watch limit reached",
    "Error: ENOSPC: System limit for number of file watchers reached, watch '/srv'",
    "2026-11-27 12:52:03,652 WARNING lorad.trainers.builtin.trainer: micro-batches are halved: CUDA out of "
    "memory. Tried to allocate 2.00 GiB",
    "micro-batches are halved: CUDA out of memory. Tried to allocate 2.00 GiB",
    "/venv/torch/cuda/memory.py:444: UserWarning: a larger batch may end in CUDA out of memory",
    "h100-3:71:90 [0] NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
    "h100-3:71:90 [0] NCCL INFO NCCL_IB_TIMEOUT set by environment to 22, connection timed out before",
    "[rank1]:[W1127 12:00:00.1 ProcessGroupNCCL.cpp:1250] NCCL error handling is off, timed out work stays",
    "torch.distributed with NCCL, time-out 600 s",
    "wandb: WARNING a file was not uploaded: [Errno 122] Disk quota exceeded",
    "mlflow DEBUG: retry after [Errno 12] Cannot allocate memory",
)
OOM = "Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB"
XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=4711, name=python"


@pytest.mark.parametrize("text", SAID)
def test_end_of_a_log_is_diagnosed(text: str) -> None:
    log = f"step 1\n{text}\n  File somewhere\nthe pool ends\n"
    assert diagnose(Clues(exit_code=1, log=log)) == SAID[text]


@pytest.mark.parametrize("line", NO_SIGNS)
def test_warnings_and_other_limits_explain_no_end(line: str) -> None:
    log = f"{line}\nTraceback (most recent call last):\nValueError: no such layer: model.9\n"
    assert diagnose(Clues(exit_code=1, log=log)) is None


def test_server_that_warned_is_explained_by_its_error() -> None:
    log = f"{ULIMIT}\n(EngineCore_0 pid=71) ERROR 11-28 19:08:15 [core.py:710] ValueError: no such layer: 9"
    assert "no such layer" in cause(log) and "ulimit" not in cause(log)
    assert in_words_of(f"vllm could not be started: it exited; {cause(log)}") is None


@pytest.mark.parametrize("diagnosis", [*SAID.values(), KILLED_FOR_MEMORY, MAYBE_KILLED_FOR_MEMORY])
def test_every_reason_comes_with_something_to_do(diagnosis: Diagnosis) -> None:
    assert len(diagnosis.advice) > 30 and diagnosis.advice.endswith((".", "`"))


def test_sigkill_after_oom_kill_may_be_of_memory() -> None:
    assert diagnose(Clues(signal=signal.SIGKILL, ooms=1)) == MAYBE_KILLED_FOR_MEMORY
    assert diagnose(Clues(signal=signal.SIGKILL, ooms=0)) is None
    assert diagnose(Clues(signal=signal.SIGKILL, ooms=None)) is None
    assert diagnose(Clues(signal=signal.SIGTERM, ooms=1)) is None


def test_oom_blames_only_the_logged_process() -> None:
    assert diagnose(Clues(pid=4711, signal=signal.SIGKILL, ooms=1, kernel=[OOM])) == KILLED_FOR_MEMORY
    assert diagnose(Clues(pid=4712, signal=signal.SIGKILL, ooms=1, kernel=[OOM])) is None


def test_parent_of_oom_killed_child_says_so() -> None:
    log = "the engine was killed by SIGKILL"
    assert diagnose(Clues(pid=1, exit_code=1, log=log, ooms=1)) == CHILD_MAYBE_KILLED_FOR_MEMORY
    assert diagnose(Clues(pid=1, exit_code=1, log=log, ooms=0)) is None
    assert diagnose(Clues(pid=1, exit_code=1, log=log, kernel=[OOM])) == CHILD_MAYBE_KILLED_FOR_MEMORY
    log = "rank 1 (pid 4711) was killed by SIGKILL"
    assert diagnose(Clues(pid=1, exit_code=1, log=log, kernel=[OOM])) == CHILD_KILLED_FOR_MEMORY


def test_gpu_errors_come_from_kernel_log() -> None:
    fault = next(text for text, diagnosis in SAID.items() if diagnosis is CUDA_FAULT)
    found = diagnose(Clues(exit_code=1, log=fault, kernel=[XID.format(94)]))
    assert found is not None and found.what == f"{ECC.what}: Xid 94 at PCI:0000:3b:00"
    found = diagnose(Clues(pid=4711, exit_code=1, kernel=[XID.format(79)]))
    assert found is not None and found.what.startswith(OFF_THE_BUS.what)


def test_gpu_error_of_another_process_is_possible() -> None:
    found = diagnose(Clues(pid=4712, exit_code=1, log="ValueError: 3", kernel=[XID.format(79)]))
    assert found is not None and found.what.startswith(f"it may be that {OFF_THE_BUS.what}: Xid 79")


def test_old_log_lines_are_not_the_cause() -> None:
    log = "No space left on device\n" + "a step\n" * LAST_LINES
    assert diagnose(Clues(exit_code=1, log=log)) is None


def test_end_without_clues_has_no_diagnosis() -> None:
    assert diagnose(Clues(exit_code=1, log="ValueError: no such answer")) is None
