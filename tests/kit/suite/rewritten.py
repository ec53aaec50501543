"""Rewrites the asserts of test files once, before workers import them.

In a fresh clone each worker would do it for itself: ten seconds of processor time, and a minute for six.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

PROCESSES = 2


def rewrite_first(config: pytest.Config) -> None:
    """Write the rewritten code of what is about to be imported, where there is none beside it."""
    if sys.dont_write_bytecode:
        return
    # whole paths: tracebacks and snapshots find a file by what its code says
    begun = [config.invocation_params.dir / str(argument).partition("::")[0] for argument in config.args]
    files = [file for path in begun for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    missing = [file for file in files if _is_rewritten(file) and not _code_of(file).exists()]
    others = [_forked(config, missing[number::PROCESSES]) for number in range(1, PROCESSES)]
    _rewrite(config, missing[::PROCESSES])
    for pid in others:
        os.waitpid(pid, 0)


def _is_rewritten(file: Path) -> bool:
    return file.name.startswith("test_") or file.name == "conftest.py"


def _code_of(file: Path) -> Path:
    return rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"


def _forked(config: pytest.Config, files: Sequence[Path]) -> int:
    if (pid := os.fork()) == 0:
        try:
            _rewrite(config, files)
        finally:
            os._exit(0)
    return pid


def _rewrite(config: pytest.Config, files: Sequence[Path]) -> None:
    """Do what pytest's import hook does; a file that can not be read is left to it, which says why."""
    for file in files:
        try:
            stat, code = rewrite._rewrite_test(file, config)
        except (OSError, SyntaxError, ValueError):
            continue
        rewrite.try_makedirs(_code_of(file).parent)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, _code_of(file))
