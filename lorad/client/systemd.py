"""The unit by which systemd looks after the daemon: its text, where it lies, and the commands about it.

`KillMode=process`: stopping or restarting the unit ends the daemon alone; runs, pools and the gateway
continue. So do they when the kernel kills a run for memory (`OOMPolicy=continue`). A unit holds no secrets.
From the environment it takes only what `_KEPT` names; the daemon also reads `daemon.env` of the home, which
only its owner writes.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lorad.box.paths import Home
from lorad.errors import Conflict, NotFound, StorageError
from lorad.files import write_whole

MARKER = "# Written by `lorad daemon install`, which may write it anew: put what is yours into a drop-in"
_NAME = "lorad.service"
BOOTED = Path("/run/systemd/system")  # as sd_booted(3)
_SYSTEM_UNITS = Path("/etc/systemd/system")
_SYSTEM_HOME = Path("/var/lib/lorad")
_WANTS = {False: "default.target", True: "multi-user.target"}
_KEPT = [
    "PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "XDG_CACHE_HOME",
]
_COMMAND_SECONDS = 60.0
_TEXT = """{marker} ({name}.d/*.conf).
[Unit]
Description=lorad, LoRA reinforcement learning on this machine
StartLimitIntervalSec=300
StartLimitBurst=10

[Service]
Type=exec
ExecStart={command}
WorkingDirectory=/
{environment}
EnvironmentFile=-{file}
KillMode=process
TimeoutStopSec=30
Restart=on-failure
RestartSec=2
OOMPolicy=continue
TasksMax=infinity
{system}
[Install]
WantedBy={target}
"""
_SERVICE_USER = """# As root it starts the processes of each run as the user who submitted it.
# So can a service user:
# User=lorad
# AmbientCapabilities=CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER CAP_KILL CAP_SETGID CAP_SETUID
"""


@dataclass(frozen=True)
class Unit:
    """A unit for the user's own daemon, or for the one of the whole machine."""

    path: Path
    home: Path
    system: bool

    @property
    def systemctl(self) -> list[str]:
        """The command that controls the systemd of this unit."""
        return ["systemctl"] if self.system else ["systemctl", "--user"]

    @property
    def next_commands(self) -> list[list[str]]:
        """The commands that make systemd start the unit."""
        return [[*self.systemctl, "daemon-reload"], [*self.systemctl, "enable", "--now", "lorad"]]

    def text(self, environment: Mapping[str, str]) -> str:
        """Write the file of the unit."""
        kept = {name: environment[name] for name in _KEPT if environment.get(name)}
        settings = {"LORAD_HOME": str(self.home), **({} if self.system else kept)}
        command = [sys.executable, "-m", "lorad.daemon", *(["--system"] if self.system else [])]
        return _TEXT.format(
            marker=MARKER,
            name=_NAME,
            command=" ".join(quoted(word).replace("$", "$$") for word in command),
            environment="\n".join(
                f"Environment={quoted(f'{name}={value}')}" for name, value in settings.items()
            ),
            file=str(self.home / "daemon.env").replace("%", "%%"),
            system=_SERVICE_USER if self.system else "",
            target=_WANTS[self.system],
        )

    def is_installed(self) -> bool:
        """Whether `install` wrote a unit for this home."""
        return (
            self.path.is_file()
            and self.is_ours()
            and f"Environment={quoted(f'LORAD_HOME={self.home}')}" in self.path.read_text().splitlines()
        )

    def is_ours(self) -> bool:
        """Whether lorad wrote the file that lies there."""
        return self.path.read_text(errors="replace").startswith(MARKER)

    def is_reachable(self) -> bool:
        """Whether the systemd that it is meant for runs, and this process can ask it."""
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        return BOOTED.is_dir() and (self.system or Path(runtime, "systemd/private").exists())


def unit_of(home: Home, *, system: bool) -> Unit:
    """Return the unit of a home. The machine's serves /var/lib/lorad unless LORAD_HOME says otherwise."""
    if system:
        root = home.root if os.environ.get("LORAD_HOME") else _SYSTEM_HOME
        return Unit(_SYSTEM_UNITS / _NAME, root, system=True)
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Unit(config / "systemd/user" / _NAME, home.root, system=False)


def write_unit(unit: Unit, *, force: bool = False) -> None:
    """Write the file of a unit, whole. Raises Conflict where another one is in the way, StorageError."""
    if unit.path.exists() and not unit.is_installed() and not force:
        whose = "serves another home" if unit.is_ours() else "was not written by lorad"
        raise Conflict(f"{unit.path} is there and {whose}", hint="Look at it; `--force` replaces it.")
    try:
        unit.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(unit.path, unit.text(os.environ).encode(), mode=0o644)
    except OSError as error:
        of_machine = "A unit of the machine is root's to write: `sudo`."
        hint = of_machine if unit.system else "Mend the directory's mode."
        raise StorageError(f"{unit.path} cannot be written: {error.strerror}", hint=hint) from error


def remove_unit(unit: Unit) -> None:
    """Remove the file of a unit. Raises NotFound, Conflict for one that lorad did not write, StorageError."""
    if not unit.path.exists():
        raise NotFound(f"there is no {unit.path}", hint="`lorad daemon install` writes it.")
    if not unit.is_ours():
        raise Conflict(f"{unit.path} was not written by lorad", hint="Remove it yourself if it is to go.")
    try:
        unit.path.unlink()
        (unit.path.parent / f"{_WANTS[unit.system]}.wants" / _NAME).unlink(missing_ok=True)
    except OSError as error:
        hint = "Is it root's?"
        raise StorageError(f"{unit.path} cannot be removed: {error.strerror}", hint=hint) from error


def tell_systemd(*commands: Sequence[str]) -> None:
    """Run commands one after the other. Raises Conflict with the words of the first that fails."""
    for command in commands:
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True)
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip() or f"it exited with {error.returncode}"
            hint = "`journalctl --user -u lorad` says more."
            raise Conflict(f"`{' '.join(command)}` failed: {said}", hint=hint) from error
        except (OSError, subprocess.TimeoutExpired) as error:
            hint = "Is systemd running here?"
            raise Conflict(f"`{' '.join(command)}` failed: {error}", hint=hint) from error


def start_by_unit(home: Home) -> bool:
    """Have systemd start the daemon of a home, where `install` wrote a unit. Returns whether it does.

    So a daemon that `lorad run` starts from an SSH session does not end with that session.
    """
    for unit in (unit_of(home, system=system) for system in (False, True)):
        if unit.is_installed() and unit.is_reachable() and (os.getuid() == 0 or not unit.system):
            try:
                tell_systemd([*unit.systemctl, "start", "lorad"])
            except Conflict:
                return False
            return True
    return False


def quoted(word: str) -> str:
    """Quote a word for systemd.syntax(7): in double quotes if needed, with its specifiers doubled."""
    plain = word.replace("%", "%%")
    if plain and not set(plain) & set(" \t\"'\\;"):
        return plain
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
