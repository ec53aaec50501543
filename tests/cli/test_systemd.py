"""`lorad daemon install`: a unit that systemd accepts, that ends nothing but the daemon, and that holds no
secret.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorad.box.paths import Home
from lorad.cli.commands.daemon import app
from lorad.client import systemd
from lorad.client.systemd import MARKER, Unit, quoted, start_by_unit, unit_of, write_unit
from lorad.errors import Conflict, NotFound


@pytest.fixture
def config(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(systemd, "BOOTED", tmp_path / "booted")
    return tmp_path / "config" / "systemd" / "user" / "lorad.service"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemd that runs, whose `systemctl` writes down what it is asked."""
    (tmp_path / "booted").mkdir()
    (tmp_path / "runtime" / "systemd").mkdir(parents=True)
    (tmp_path / "runtime" / "systemd" / "private").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    program, said = tmp_path / "bin" / "systemctl", tmp_path / "asked"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {said}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return said


def lorad(*arguments: str) -> dict[str, object]:
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False, standalone_mode=False)
    told: dict[str, object] = json.loads(done.stdout)
    return told


def test_unit_kills_only_the_daemon_and_restarts_it(config: Path, home: Path) -> None:
    told = lorad("install")
    text = config.read_text().splitlines()
    assert told["next"][:2] == ["systemctl --user daemon-reload", "systemctl --user enable --now lorad"]  # type: ignore[index]
    assert {"KillMode=process", "Restart=on-failure", "OOMPolicy=continue", "WantedBy=default.target"} <= set(
        text
    )
    assert f"ExecStart={sys.executable} -m lorad.daemon" in text
    assert f"Environment=LORAD_HOME={home}" in text


def test_the_unit_holds_no_secret(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", "/data/hf")
    lorad("install")
    assert "hf_secret" not in config.read_text() and "Environment=HF_HOME=/data/hf" in config.read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("system", [False, True])
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path, system: bool) -> None:
    unit = Unit(tmp_path / "lorad.service", tmp_path / "a home, 100%", system)
    write_unit(unit)
    command = ["systemd-analyze", "verify", "--man=no", str(unit.path), *([] if system else ["--user"])]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "lorad.service:" not in done.stderr, done.stderr
    assert stat.S_IMODE(unit.path.stat().st_mode) == 0o644


def test_a_unit_of_somebody_else_stays(config: Path) -> None:
    config.parent.mkdir(parents=True)
    config.write_text("[Service]\nExecStart=/bin/mine\n")
    for command in ("install", "uninstall"):
        with pytest.raises(Conflict, match="not written by lorad"):
            lorad(command)
    assert "/bin/mine" in config.read_text()
    lorad("install", "--force")
    assert config.read_text().startswith(MARKER)


def test_the_unit_of_another_home_stays(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lorad("install")
    monkeypatch.setenv("LORAD_HOME", "/elsewhere")
    with pytest.raises(Conflict, match="serves another home"):
        lorad("install")


def test_a_second_install_writes_it_anew(config: Path) -> None:
    lorad("install")
    config.write_text(config.read_text().replace(sys.executable, "/old/python"))
    lorad("install")
    assert sys.executable in config.read_text()


def test_now_asks_systemd(config: Path, asked: Path) -> None:
    assert lorad("install", "--now")["started"] is True
    assert asked.read_text().splitlines() == ["--user daemon-reload", "--user enable --now lorad"]


def test_install_now_without_systemd_gives_the_command(config: Path) -> None:
    with pytest.raises(Conflict, match="systemd does not run here") as refused:
        lorad("install", "--now")
    assert "systemctl --user enable --now lorad" in refused.value.hint and config.exists()


def test_uninstall_removes_what_install_wrote(config: Path, asked: Path) -> None:
    lorad("install")
    lorad("uninstall")
    assert not config.exists()
    assert asked.read_text().splitlines() == ["--user disable --now lorad", "--user daemon-reload"]
    with pytest.raises(NotFound):
        lorad("uninstall")


def test_systemd_starts_a_daemon_with_a_unit(config: Path, home: Path, asked: Path) -> None:
    assert not start_by_unit(Home(home))
    lorad("install")
    assert start_by_unit(Home(home))
    assert asked.read_text().splitlines() == ["--user start lorad"]


def test_without_systemd_the_unit_does_not_matter(config: Path, home: Path) -> None:
    lorad("install")
    assert not start_by_unit(Home(home))


def test_system_unit_serves_all_users(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAD_HOME")
    unit = unit_of(Home(home), system=True)
    assert (str(unit.path), str(unit.home)) == ("/etc/systemd/system/lorad.service", "/var/lib/lorad")
    text = unit.text({"PATH": "/of/root", "SECRET": "x"}).splitlines()
    assert f"ExecStart={sys.executable} -m lorad.daemon --system" in text
    assert "WantedBy=multi-user.target" in text and not any("/of/root" in line for line in text)


def test_words_are_quoted_as_systemd_reads_them() -> None:
    assert [quoted(word) for word in ("/a/b", "a b", "100%", 'say "x"', "back\\slash")] == [
        "/a/b",
        '"a b"',
        "100%%",
        '"say \\"x\\""',
        '"back\\\\slash"',
    ]
