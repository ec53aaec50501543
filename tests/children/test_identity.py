"""A process and later ones with its pid: `lorad/children/identity.py`."""

import os
import signal
import subprocess

import pytest

from lorad.children.identity import Identity, start_time, stat_of
from lorad.daemon.process import shim


def test_a_zombie_is_known_but_not_alive() -> None:
    child = subprocess.Popen(["sleep", "600"])
    process = Identity.of(child.pid)
    assert start_time(child.pid) == process.start
    assert process.signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Identity.of(child.pid) == process and not process.is_alive
    child.wait()
    assert stat_of(child.pid) is None and start_time(child.pid) is None


def test_signals_spare_a_later_process_with_the_pid() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        process = Identity.of(child.pid)
        assert not process._replace(start=process.start - 1).signal(signal.SIGKILL)
        assert not process._replace(boot="another").signal(signal.SIGKILL)
        assert child.poll() is None
        assert process.signal(signal.SIGKILL)
    assert not process.signal(signal.SIGKILL)


def test_nobody_has_a_pid_that_is_gone() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(ProcessLookupError):
        Identity.of(child.pid)


def test_the_shim_writes_what_is_read_here() -> None:
    status = shim.born(os.getpid())
    assert Identity(status["boot_id"], status["pid"], status["start_time"]) == Identity.of(os.getpid())
