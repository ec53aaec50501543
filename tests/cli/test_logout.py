"""`lorad doctor` says whether a logout ends the daemon and its runs: logind's settings, linger, and their
cgroups.
"""

from pathlib import Path

import pytest

from lorad.children.interpreter import InterpreterFinding
from lorad.cli.doctor.logout import logout_check, read_settings

SESSION = "0::/user.slice/user-1000.slice/session-4.scope"
MANAGER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/lorad.service"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    put(tmp_path, "run/systemd/system/.keep", "")
    put(tmp_path, "etc/systemd/logind.conf", "[Login]\n#KillUserProcesses=no\n#KillExcludeUsers=root\n")
    return tmp_path


def put(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def checked(root: Path, cgroup: str = SESSION, user: str = "ada") -> InterpreterFinding:
    put(root, "proc/7/cgroup", f"{cgroup}\n")
    return logout_check(user, {"the daemon": 7}, uid=1000, root=root)


def test_a_machine_without_systemd_is_fine(tmp_path: Path) -> None:
    assert checked(tmp_path) == InterpreterFinding("logout", True, "no systemd here: a logout ends nothing")


def test_default_of_logind_counts_where_nothing_is_set(machine: Path) -> None:
    assert checked(machine).detail == "a logout ends nothing: KillUserProcesses is off"
    put(machine, "etc/systemd/logind.conf", "[Login]\n#KillUserProcesses=yes\n")
    finding = checked(machine)
    assert not finding.ok and finding.detail.endswith(
        "the daemon: KillUserProcesses=yes (the default of logind)"
    )


def test_killing_logout_names_the_file_saying_so(machine: Path) -> None:
    put(machine, "etc/systemd/logind.conf.d/50-box.conf", "[Login]\nKillUserProcesses = yes\n")
    finding = checked(machine)
    assert finding.detail == (
        "a logout ends the daemon: KillUserProcesses=yes (/etc/systemd/logind.conf.d/50-box.conf)"
    )
    assert "loginctl enable-linger" in finding.hint and "lorad daemon install --now" in finding.hint


def test_last_drop_in_by_name_counts(machine: Path) -> None:
    put(machine, "etc/systemd/logind.conf.d/10-first.conf", "[Login]\nKillUserProcesses=yes\n")
    put(machine, "usr/lib/systemd/logind.conf.d/90-last.conf", "[Login]\nKillUserProcesses=no\n")
    assert checked(machine).ok


def test_drop_in_hides_the_vendors_namesake(machine: Path) -> None:
    put(machine, "usr/lib/systemd/logind.conf.d/50.conf", "[Login]\nKillUserProcesses=yes\n")
    put(machine, "etc/systemd/logind.conf.d/50.conf", "[Login]\n")
    assert read_settings(machine)["KillUserProcesses"].value == "no"


@pytest.mark.parametrize(
    ("line", "user", "ok"),
    [
        ("KillExcludeUsers=root ada", "ada", True),
        ("KillOnlyUsers=bob", "ada", True),
        ("KillOnlyUsers=bob ada", "ada", False),
        ("KillOnlyUsers=", "root", True),
    ],
)
def test_who_is_spared_is_spared(machine: Path, line: str, user: str, ok: bool) -> None:
    put(machine, "etc/systemd/logind.conf", f"[Login]\nKillUserProcesses=yes\n{line}\n")
    assert checked(machine, user=user).ok is ok


def test_the_users_systemd_needs_linger(machine: Path) -> None:
    finding = checked(machine, MANAGER)
    assert not finding.ok and finding.hint == "`loginctl enable-linger ada` keeps it up."
    put(machine, "var/lib/systemd/linger/ada", "")
    assert checked(machine, MANAGER) == InterpreterFinding(
        "logout", True, "a logout ends nothing: linger is on"
    )


def test_a_service_of_the_machine_needs_nothing(machine: Path) -> None:
    put(machine, "etc/systemd/logind.conf", "[Login]\nKillUserProcesses=yes\n")
    assert checked(machine, "0::/system.slice/lorad.service").ok


def test_the_older_hierarchy_is_read_as_well(machine: Path) -> None:
    put(machine, "etc/systemd/logind.conf", "[Login]\nKillUserProcesses=yes\n")
    cgroups = "4:cpu:/\n1:name=systemd:/user.slice/user-1000.slice/session-4.scope\n0::/"
    assert not checked(machine, cgroups).ok
