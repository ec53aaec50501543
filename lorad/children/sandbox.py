"""A bubblewrap around a process of user code: no network, no home, no other processes, nothing written.

It sees the system, its interpreter, lorad's modules and the folder of its own file, all read-only, and a
/tmp of its own. https://github.com/containers/bubblewrap
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lorad.box.paths import default_home
from lorad.children import guard
from lorad.children.interpreter import output_of
from lorad.errors import SpecError

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ssl", "/etc/localtime"),
    *("/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf"),
)
_SHARED = ("/tmp", "/var/tmp", "/dev/shm")  # with files of others
_TRIAL_SECONDS = 20.0
_PREFIXES = "import sys; print(sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, sep='\\n')"
_INSTALL = "Install bubblewrap (on Debian and Ubuntu: apt install bubblewrap), or leave the key out."


def sandboxed(
    file: Path,
    python: Path | None,
    environment: Mapping[str, str],
    key: str,
    *,
    shown: Sequence[Path] = (),
) -> list[str]:
    """Try bubblewrap, and return the command in front of that of a process for a file of user code.

    `python` is None for lorad's own; `shown` are further directories that the process sees, as a socket's.
    Raises SpecError, which blames `key`, where bubblewrap is missing or may not do this here.
    """
    if (program := shutil.which("bwrap")) is None:
        raise SpecError("there is no bwrap here", key=key, hint=_INSTALL)
    folder = file.parent.resolve()
    if str(folder) in _SHARED or Path.home().resolve().is_relative_to(folder):
        raise SpecError(
            f"{file} lies in {folder}, all of which the sandbox would show",
            key=key,
            hint="Move it into a folder of its own.",
        )
    command = [program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for path in _SYSTEM:
        command += ["--ro-bind-try", path, path]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    lorad = Path(guard.__file__).parents[1]
    modules = [str(lorad)]  # another interpreter gets lorad's own package alone
    if python is None:
        places = environment.get("PYTHONPATH", "").split(os.pathsep)
        modules = [str(lorad.parent), *filter(os.path.isabs, places)]
    for path in dict.fromkeys([*_prefixes(python), *modules, str(folder)]):
        if Path(path) != Path("/usr"):
            command += ["--ro-bind-try", path, path]
    if (secrets := default_home().resolve()).is_dir():
        command += ["--tmpfs", str(secrets)]
    for directory in shown:
        command += ["--ro-bind", str(directory), str(directory)]
    command += ["--chdir", str(folder), "--setenv", "HOME", "/tmp", "--setenv", "TMPDIR", "/tmp"]
    try:
        output_of([*command, str(python or sys.executable), "-I", "-S", "-c", ""], _TRIAL_SECONDS)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"it exited with {error.returncode}"])[-1]
        raise SpecError(
            f"bubblewrap does not work here: {reason}",
            key=key,
            hint="It needs unprivileged user namespaces, which sysctl or AppArmor may forbid. Or leave the "
            "key out.",
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpecError(f"bubblewrap does not work here: {error}", key=key, hint=_INSTALL) from None
    return command


def _prefixes(python: Path | None) -> list[str]:
    """Return the directories of an interpreter and its packages."""
    if python is None:
        own = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
        return [*own, str(Path(sys.executable).resolve().parents[1])]
    prefixes = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # the start of the process reports it
        prefixes = output_of([str(python), "-I", "-c", _PREFIXES], _TRIAL_SECONDS)
    return [*filter(None, prefixes.split("\n")), str(python.resolve().parents[1])]
