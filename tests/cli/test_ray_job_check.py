"""lorad doctor in a Ray job: lorad would find GPUs by itself."""

from pathlib import Path

import msgspec
import pytest

from lorad.box.config import load
from lorad.cli.doctor.cluster import ray_job_check


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def config(home: Path, text: str = "") -> Path:
    (home / "config.yaml").write_text(text)
    return home / "config.yaml"


def test_outside_of_ray_nothing_is_said(home: Path) -> None:
    assert list(ray_job_check(load(config(home)))) == []


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "RAY_JOB_ID"])
def test_a_ray_job_without_a_cluster_fails(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    (found,) = ray_job_check(load(config(home)))
    assert not found.ok and name in found.detail and "cluster: {kind: ray, python: PYTHON}" in found.hint


def test_a_ray_job_with_a_cluster_is_fine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_ID", "x")
    settings = load(config(home, "cluster: {kind: ray, python: /usr/bin/python3}"))
    assert [found.ok for found in ray_job_check(settings)] == [True]
    assert not next(ray_job_check(msgspec.structs.replace(settings, cluster=None))).ok
