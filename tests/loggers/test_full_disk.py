"""Loggers whose disk fills up: they fail in words, and have every point once there is space again."""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loggers.test_kills import expected, run, write_journal


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    (disk := tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m,mode=0700", "lorad", str(disk)]
    if (done := subprocess.run(mount, capture_output=True, text=True)).returncode:
        pytest.skip(f"a small filesystem cannot be mounted here: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path, leave: int) -> None:
    """Leave so many bytes."""
    with (disk / "ballast").open("wb") as file:
        file.write(bytes(shutil.disk_usage(disk).free - leave))


@pytest.mark.system
@pytest.mark.parametrize(
    "name", ["tensorboard", *(pytest.param(name, marks=pytest.mark.long) for name in ("mlflow", "wandb"))]
)
def test_full_disk_loses_no_point(name: str, small_disk: Path) -> None:
    pytest.importorskip(name)
    (cursors := small_disk.parent / "cursors").mkdir()
    (small_disk / "loggers").symlink_to(cursors)  # a cursor has room: it must not move past what failed
    journal = small_disk / "journal.jsonl"
    write_journal(journal, random.Random(3))
    shutil.copy(journal, small_disk / "grown.jsonl")
    fill(small_disk, leave=16 << 10)
    tried = run("tests.loggers.lives", "--once", name, str(small_disk))
    assert tried.strip() != "written"
    os.remove(small_disk / "ballast")
    assert run("tests.loggers.lives", "--once", name, str(small_disk)).strip() == "written"
    read = json.loads(run("tests.loggers.readers", name, str(small_disk)).splitlines()[-1])
    assert {key: sorted(steps) for key, steps in read.items()} == {
        key: sorted(steps) for key, steps in expected(journal).items()
    }
