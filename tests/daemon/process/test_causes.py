"""Ends become reasons with advice."""

import signal

import pytest

from lorad.daemon.process.causes import (
    CHILD_KILLED_FOR_MEMORY,
    CUDA_FAULT,
    CUDA_MEMORY,
    DISK_FULL,
    ECC,
    KILLED_FOR_MEMORY,
    LAST_LINES,
    MEMORY,
    NCCL_ERROR,
    NCCL_TIME_OUT,
    OFF_THE_BUS,
    QUOTA,
    SHARED_MEMORY,
    Clues,
    Diagnosis,
    diagnose,
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
}
OOM = "Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB"
XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=4711, name=python"


@pytest.mark.parametrize("text", SAID)
def test_end_of_a_log_is_diagnosed(text: str) -> None:
    log = f"step 1\n{text}\n  File somewhere\nthe pool ends\n"
    assert diagnose(Clues(exit_code=1, log=log)) == SAID[text]


@pytest.mark.parametrize("diagnosis", [*SAID.values(), KILLED_FOR_MEMORY])
def test_every_reason_comes_with_something_to_do(diagnosis: Diagnosis) -> None:
    assert len(diagnosis.advice) > 30 and diagnosis.advice.endswith((".", "`"))


def test_sigkill_after_oom_kill_blames_memory() -> None:
    assert diagnose(Clues(signal=signal.SIGKILL, ooms=1)) == KILLED_FOR_MEMORY
    assert diagnose(Clues(signal=signal.SIGKILL, ooms=0)) is None
    assert diagnose(Clues(signal=signal.SIGKILL, ooms=None)) is None
    assert diagnose(Clues(signal=signal.SIGTERM, ooms=1)) is None


def test_oom_blames_only_the_logged_process() -> None:
    assert diagnose(Clues(pid=4711, signal=signal.SIGKILL, ooms=1, kernel=[OOM])) == KILLED_FOR_MEMORY
    assert diagnose(Clues(pid=4712, signal=signal.SIGKILL, ooms=1, kernel=[OOM])) is None


def test_parent_of_oom_killed_child_says_so() -> None:
    log = "the engine was killed by SIGKILL"
    assert diagnose(Clues(pid=1, exit_code=1, log=log, ooms=1)) == CHILD_KILLED_FOR_MEMORY
    assert diagnose(Clues(pid=1, exit_code=1, log=log, ooms=0)) is None


def test_gpu_errors_come_from_kernel_log() -> None:
    fault = next(text for text, diagnosis in SAID.items() if diagnosis is CUDA_FAULT)
    found = diagnose(Clues(exit_code=1, log=fault, kernel=[XID.format(94)]))
    assert found is not None and found.what == f"{ECC.what}: Xid 94 at PCI:0000:3b:00"
    found = diagnose(Clues(exit_code=1, kernel=[XID.format(79)]))
    assert found is not None and OFF_THE_BUS.what in found.what


def test_old_log_lines_are_not_the_cause() -> None:
    log = "No space left on device\n" + "a step\n" * LAST_LINES
    assert diagnose(Clues(exit_code=1, log=log)) is None


def test_end_without_clues_has_no_diagnosis() -> None:
    assert diagnose(Clues(exit_code=1, log="ValueError: no such answer")) is None
