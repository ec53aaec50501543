"""kill -9 at every statement that a piece of work sends to SQLite, one after the other."""

import os
import signal
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def killed_at_every_statement(
    work: Callable[[Path], object], directory: Path, most: int = 10**6, every: int = 1
) -> list[Path]:
    """Runs `work(path)` in forked children, each with a path of its own: the n-th is killed before its n-th
    statement. every: only of each so many statements.

    The paths of those killed. The first child that ends by itself must have succeeded; or `most` children
    were killed.
    """
    killed: list[Path] = []
    while len(killed) < most:
        path = directory / f"killed-at-{len(killed):04d}"
        path.mkdir()
        with warnings.catch_warnings():
            # other tests leave threads; the child starts none
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _work_and_die(work, path, len(killed) * every)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"the work failed in {path}"
            return killed
        assert os.WTERMSIG(status) == signal.SIGKILL
        killed.append(path)
    return killed


def _work_and_die(work: Callable[[Path], object], path: Path, statements: int) -> None:
    """In the child: never returns."""
    left, connect = [statements], sqlite3.connect

    def traced(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        connection.set_trace_callback(count)
        return connection

    def count(_: str) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sqlite3, "connect", traced)
            work(path)
        os._exit(0)
    except BaseException:
        os._exit(1)
