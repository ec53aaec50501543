"""User code in bubblewrap: without network, without anybody's files but those that it needs to run.

It finds the system and its interpreter, read-only, the folder of the user's file, read-only, and an empty
/tmp, which is also its HOME and goes with the process. Processes of others are not there, nor devices, GPUs
included.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from lorad.box.paths import default_home
from lorad.children.user_serve import Code
from lorad.errors import SpecError

_LORAD = Path(__file__).parents[1]
_HOME = "/tmp"
_WRITABLE = (_HOME, "/dev/shm")
_SHARED = ("/", "/tmp", "/var/tmp", "/dev/shm")  # folders with files of others
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # links into /usr, or directories
_ETC = (
    *("alternatives", "ca-certificates", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime"),
    *("mime.types", "nsswitch.conf", "passwd", "pki", "python3", "ssl", "timezone"),
)
_UNSHARED = ("user", "ipc", "pid", "net", "uts", "cgroup-try")
_SECONDS = 20.0
_MOST_LINKS = 40
_ASK = """
import json, site, sys
base = site.getuserbase() if site.ENABLE_USER_SITE else ""
places = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *sys.path[1:]]
print("\\n" + json.dumps([base, places]))
"""
_WITHOUT = "Or leave the key out: user code then has your network and your files."
_INSTALL = f"Install bubblewrap (Debian and Ubuntu: `apt install bubblewrap`). {_WITHOUT}"
_ALLOW = f"Does this machine, or its container, allow unprivileged user namespaces? {_WITHOUT}"
_MOVE = "Move it into a folder of its own, whose files user code may read."


class Sandbox:
    """What the process of some user code finds. key: of the spec, which errors blame."""

    def __init__(
        self, key: str, code: Code, environment: Mapping[str, str], python: Path | None = None
    ) -> None:
        """environment: what the process would have without. python: another interpreter. Raises SpecError
        where there is no bubblewrap, or the file lies where everything does.
        """
        self._key, self._code, self._environment, self._python = key, code, environment, python
        self._lorad_home = Path(environment.get("LORAD_HOME") or default_home())
        self._bwrap = shutil.which("bwrap")
        if self._bwrap is None:
            raise SpecError("there is no bwrap on this machine", key=key, hint=_INSTALL)
        file = Path(code.file)
        self._folder = file.parent if code.file and not file.is_relative_to(_LORAD) else None
        if self._folder is not None and self._is_shared(self._folder):
            problem = f"{file} lies in {self._folder}, which user code in a sandbox must not see"
            raise SpecError(problem, key=key, hint=_MOVE)
        self._made: tuple[list[str], dict[str, str]] | None = None

    def wrap(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return (argv, environment) of a program within. Raises SpecError, after a trial, where the machine
        does not allow it."""
        if self._made is None:
            base, places = self._asked()
            variables = {k: v for k, v in self._environment.items() if k not in ("TMPDIR", "XDG_CACHE_HOME")}
            variables |= {"HOME": _HOME} | ({"PYTHONUSERBASE": base} if base else {})
            options = [str(self._bwrap), *self._options(places), "--"]
            self._try(options, variables)
            self._made = options, variables
        options, variables = self._made
        return [*options, *argv], variables

    @property
    def _program(self) -> Path:
        return self._python or Path(sys.executable)

    def _is_shared(self, folder: Path) -> bool:
        """Return whether a folder holds the home, or files of everybody."""
        real = folder.resolve()
        homes = [Path(self._environment.get("HOME") or Path.home()), Path.home()]
        return (
            str(real) in _SHARED
            or real == self._lorad_home.resolve()
            or any(home.resolve().is_relative_to(real) for home in homes)
        )

    def _asked(self) -> tuple[str, list[Path]]:
        """Return where the interpreter has the user's packages, if anywhere, and all of its folders."""
        command = [str(self._program), "-c", _ASK]
        try:
            done = subprocess.run(
                command, env=self._environment, capture_output=True, timeout=_SECONDS, check=True, cwd="/"
            )
            base, places = json.loads(done.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            problem = f"{self._program} did not say where its modules are: {error}"
            raise SpecError(problem, key=self._key, hint="Does it work, outside of lorad?") from None
        return base, [Path(place) for place in places if place]

    def _options(self, places: Sequence[Path]) -> list[str]:
        size = ["--size", str(self._code.memory)] if self._code.memory and _takes_size(self._bwrap) else []
        options = [f"--unshare-{name}" for name in _UNSHARED]
        options += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        options += ["--proc", "/proc", "--dev", "/dev"]
        options += [o for path in _WRITABLE for o in (*size, "--tmpfs", path)]
        bound = [Path("/usr"), *(path for name in _SYSTEM if not (path := Path("/", name)).is_symlink())]
        options += [o for path in bound for o in ("--ro-bind-try", str(path), str(path))]
        links = [path for name in _SYSTEM if (path := Path("/", name)).is_symlink()]
        options += [o for path in links for o in ("--symlink", os.readlink(path), str(path))]
        for path in (Path("/nix/store"), *(Path("/etc", name) for name in _ETC)):
            options += ["--ro-bind-try", str(path), str(path)]
        for path in self._wanted(places):
            if not any(path.is_relative_to(other) for other in bound):
                options += ["--ro-bind", str(path), str(path)]
                bound.append(path)
        if any(self._lorad_home.resolve().is_relative_to(path.resolve()) for path in bound):
            options += ["--tmpfs", str(self._lorad_home)]
        return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(self._folder or _HOME)]

    def _wanted(self, places: Sequence[Path]) -> Iterator[Path]:
        """Yield what the interpreter and the user's file need, as far as it is there."""
        folders = [place for place in places if place != _LORAD.parent]  # of a checkout, lorad alone
        for place in (*folders, _LORAD):
            if place.is_absolute() and place.exists() and not self._is_shared(place):
                yield place
        if self._folder is not None:
            yield self._folder
        step = self._program
        for _ in range(_MOST_LINKS):
            yield step
            if not step.is_symlink():
                break
            step = Path(os.path.normpath(step.parent / os.readlink(step)))

    def _try(self, options: Sequence[str], variables: Mapping[str, str]) -> None:
        """Raises SpecError where an interpreter within does not start."""
        command = [*options, str(self._program), "-I", "-S", "-c", ""]
        try:
            done = subprocess.run(
                command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS
            )
            said = done.stderr.decode(errors="replace").strip() or f"it exited with {done.returncode}"
            if not done.returncode:
                return
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        problem = f"bubblewrap does not work here: {said.splitlines()[-1][:300]}"
        raise SpecError(problem, key=self._key, hint=_ALLOW)


@cache
def _takes_size(bwrap: str | None) -> bool:
    """Return whether this bubblewrap can bound a tmpfs."""
    done = subprocess.run([str(bwrap), "--help"], capture_output=True, timeout=_SECONDS, check=False)
    return b"--size" in done.stdout + done.stderr
