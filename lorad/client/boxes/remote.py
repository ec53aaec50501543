"""Another box's daemon, over ssh: its master forwards the daemon's Unix socket to one here.

While the master lives a request starts no process; where sshd forwards no sockets it starts a session through
the master, in which `lorad daemon dial` carries the bytes. ssh's keys are the authentication, and the daemon
there sees the user who logged in. Nothing here ever starts a daemon on this machine.
"""

import contextlib
import fcntl
import hashlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from lorad import __version__
from lorad.box.config import AlarmLimits
from lorad.box.paths import SOCKET_PATH_LIMIT, runtime_directory
from lorad.client.boxes.bundle import files_here, send
from lorad.client.boxes.entry import BoxEntry, hosts_path
from lorad.client.transport import PROTOCOL, Transport
from lorad.errors import Conflict, DaemonUnreachable, HostUnreachable, LoradError, SpecError, StorageError
from lorad.files import write_whole

_MASTER = (
    *("-o", "ControlMaster=auto", "-o", "ControlPersist=600", "-o", "StreamLocalBindUnlink=yes"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3", "-o", "ConnectTimeout=10"),
)
_Connection = socket.socket  # its name is a property of `FarHome`, too
_REPEATABLE = ("GET", "PUT")  # methods of requests that may be sent twice
_ANSWER_SECONDS = 120.0  # for the first command there, while a person may type a password
_ADDED = 17  # characters that ssh adds to a control path while it binds it
_SSH_FAILED = 255  # the exit code of ssh itself
_NOT_FOUND = 127  # that of a shell without the command
_REMEDIES = (  # what ssh prints when it fails, and what to do about it
    ("Host key verification failed", "Call `ssh {ssh}` once, and answer what it asks about the host's key."),
    ("Permission denied", "`ssh {ssh}` has to work first: with a key, an agent or a password."),
    ("Could not resolve hostname", "`lorad hosts` lists what is known; ~/.ssh/config may name the address."),
    ("", "`ssh {ssh}` has to work first; is the machine up?"),
)


class FarDaemon(msgspec.Struct):
    """What `lorad daemon socket --json` says of a box.

    socket: the path of the daemon's socket there.
    home: LORAD_HOME there.
    version: the version of lorad on the box.
    protocol: the version of the API that it speaks.
    user: who is logged in.
    running: whether a daemon answers there.
    login: the home directory of that user.
    alarms: when alarms are raised there.
    is_dialled: whether each connection is carried by a `lorad daemon dial` there, as sshd forwards none; this
        is found out here.
    """

    socket: str
    home: str
    version: str
    protocol: int
    user: str
    running: bool
    login: str
    alarms: AlarmLimits = AlarmLimits()
    is_dialled: bool = False


class LineLost(DaemonUnreachable):
    """The connection of a request broke, while box and daemon are up."""


@dataclass(frozen=True)
class FarHome:
    """A home on another box, in place of a `Home` of this one.

    name: what the user calls the box.
    cwd: where relative paths begin on it, as the command line says; "" where hosts.yaml says it.
    asks: whether ssh may ask for a password on the terminal.
    sends: whether the files that a spec names are sent along, and relative paths begin among them.
    """

    name: str
    entry: BoxEntry
    cwd: str = ""
    asks: bool = True
    sends: bool = False

    @property
    def flag(self) -> str:
        """The beginning of a command that is about this box."""
        return f"lorad --host {self.name}"

    def transport(self, timeout: float) -> "_BoxTransport":
        """Make what sends requests to its daemon; the line is opened when the first one needs it."""
        return _BoxTransport(self, timeout)

    def directory_for(self, body: msgspec.Struct) -> str:
        """Return the whole path of the directory there in which relative paths of a spec begin.

        Raises SpecError where no directory is named and the spec names a file that is here.
        """
        named = self.cwd or self.entry.cwd
        if not named and (path := next(iter(files_here(body)), "")):
            message = f"{path} is a file of this machine, and the run works on {self.name}"
            hint = (
                f"Send it along, `{self.flag} --send …`; or copy it (`scp {path} {self.entry.ssh}:`) and say "
                f"where it is: `{self.flag} --cwd DIR …`, or `cwd:` of the host in {hosts_path()}."
            )
            raise SpecError(message, hint=hint)
        home = self.facts().login
        directory = os.path.join(home, named.removeprefix("~").lstrip("/") if named[:1] == "~" else named)
        return os.path.normpath(directory)

    # -- files here ------------------------------------------------------------------------------------------
    def _file(self, ending: str) -> Path:
        """Return a file of the line here. Raises StorageError where a socket's name would be too long."""
        directory = runtime_directory() / "ssh"
        directory.mkdir(mode=0o700, exist_ok=True)
        key = repr((self.entry.ssh, self.entry.lorad, self.entry.home))
        path = directory / f"{hashlib.sha256(key.encode()).hexdigest()[:12]}{ending}"
        if len(os.fsencode(path)) + _ADDED > SOCKET_PATH_LIMIT:
            hint = "Set XDG_RUNTIME_DIR to a short directory of yours."
            raise StorageError(f"{directory} is too long a name for sockets of ssh", hint=hint)
        return path

    @property
    def socket(self) -> Path:
        return self._file(".sock")

    def facts(self) -> FarDaemon:
        """Return what the box said when the line was opened, and open it where it never was."""
        return self.last_facts() or self.open()

    def last_facts(self) -> FarDaemon | None:
        """Return what the box said when the line was opened; None where it never was."""
        try:
            return msgspec.json.decode(self._file(".json").read_bytes(), type=FarDaemon)
        except (OSError, msgspec.DecodeError):
            return None

    # -- the line --------------------------------------------------------------------------------------------
    def open(self, *, anew: bool = False) -> FarDaemon:
        """Have a master forward the daemon's socket, unless one does. Raises HostUnreachable.

        anew: ask the box in any case how it is, as after a request that broke.
        """
        with self._file(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one command at a time opens the line
            before = self.last_facts()
            if not anew and before is not None and self._is_open():  # another command was quicker
                return before
            facts = self._ask()
            if facts.protocol != PROTOCOL:
                message = (
                    f"lorad on {self.name} (version {facts.version}) speaks protocol {facts.protocol}, and "
                    f"this command protocol {PROTOCOL}"
                )
                hint = "Install the same version on both; the newer one is better."
                raise HostUnreachable(message, hint=hint)
            if before is None or before.socket != facts.socket or not self._is_open():
                for path in {facts.socket, before.socket if before else facts.socket}:
                    self._ssh(["-O", "cancel", "-L", f"{self.socket}:{path}"])
                self.socket.unlink(missing_ok=True)
                code, output = self._ssh(["-O", "forward", "-L", f"{self.socket}:{facts.socket}"])
                if code != 0:
                    hint = self._remedy(output)
                    raise HostUnreachable(f"ssh forwards no socket of {self.name}: {output}", hint=hint)
            is_dialled = bool(before and before.is_dialled)
            if facts.running:
                is_dialled = not self._is_open(carries=True)
            facts = structs.replace(facts, is_dialled=is_dialled)
            write_whole(self._file(".json"), msgspec.json.encode(facts), durable=False)
            return facts

    def dial(self) -> _Connection:
        """Start a `lorad daemon dial` there, and return what is connected to it. Raises HostUnreachable."""
        self.open()
        command = ["ssh", *self._session, "-o", "BatchMode=yes", "-T", "--", self.entry.ssh]
        near, far = socket.socketpair()
        with far:
            process = subprocess.Popen(
                [*command, self.words(["daemon", "dial"], cwd="")],
                stdin=far.fileno(),
                stdout=far.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the command, which may have more to ask
            )
        threading.Thread(target=process.wait, daemon=True, name="lorad dial").start()
        return near

    def _is_open(self, *, carries: bool = False) -> bool:
        """Return whether a master takes connections to the daemon here.

        carries: whether a daemon that works also has to answer through it: ssh forwards a socket without
            asking, and sshd may refuse each connection to it.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
            trial.settimeout(10 if carries else 5)
            try:
                trial.connect(str(self.socket))
                if carries:
                    trial.sendall(b"GET /v1/status HTTP/1.0\r\n\r\n")
                    return bool(trial.recv(1))
            except TimeoutError:
                return carries  # then it is slow, and was not refused
            except OSError:
                return False
        return True

    def close(self) -> None:
        """End the master, and forget what the box said."""
        self._ssh(["-O", "exit"])
        for ending in (".sock", ".json"):
            self._file(ending).unlink(missing_ok=True)

    def _ask(self) -> FarDaemon:
        """Ask lorad there where its daemon is; this starts the master. Raises HostUnreachable.

        A master whose connection is dead, as after a laptop's sleep, is ended and replaced once.
        """
        command = ["-T", "--", self.entry.ssh, self.words(["daemon", "socket", "--json"], cwd="")]
        code, output = self._ssh(command, whole=True)
        if code == _SSH_FAILED and self._file(".ctl").exists():
            self._ssh(["-O", "exit"])
            self._file(".ctl").unlink(missing_ok=True)
            code, output = self._ssh(command, whole=True)
        if code == 0:
            for line in reversed(output.splitlines()):  # the shell's own files may print before it
                with contextlib.suppress(msgspec.DecodeError):
                    return msgspec.json.decode(line, type=FarDaemon)
        raise self._refusal(code, output)

    def _refusal(self, code: int, output: str) -> HostUnreachable:
        """Say why lorad there did not answer."""
        last = output.strip().splitlines()[-1].strip() if output.strip() else f"exit code {code}"
        if code == _SSH_FAILED:
            return HostUnreachable(f"host {self.name} cannot be reached: {last}", hint=self._remedy(output))
        if code == _NOT_FOUND:
            hint = (
                f"Name it whole: `lorad hosts add {self.name} {self.entry.ssh} --lorad "
                "~/venvs/lorad/bin/lorad`. The PATH of a shell of ssh has no virtual environments."
            )
            return HostUnreachable(f"{self.entry.lorad} is not found on {self.name}", hint=hint)
        hint = f"It may be of an older version: `ssh {self.entry.ssh} {self.entry.lorad} --version`."
        return HostUnreachable(f"lorad on {self.name} does not say where its daemon is: {last}", hint=hint)

    def _remedy(self, output: str) -> str:
        return next(hint for words, hint in _REMEDIES if words in output).format(ssh=self.entry.ssh)

    def words(self, arguments: Sequence[str], *, cwd: str) -> str:
        """Return the words for the shell there that call lorad with `arguments` in a directory."""
        home = [f"LORAD_HOME={self.entry.home}"] if self.entry.home else []
        words = ["exec", "env", "LORAD_HOST=here", *home, self.entry.lorad, *arguments]
        enter, *quoted = (  # the shell is to expand a `~/` at the beginning of a word
            f"~/{shlex.quote(word[2:])}" if word.startswith("~/") and len(word) > 2 else shlex.quote(word)
            for word in (cwd, *words)
        )
        return (f"cd {enter} && " if cwd else "") + " ".join(quoted)

    @property
    def _session(self) -> list[str]:
        """The options of an ssh that works through the master and starts none."""
        path = f"ControlPath={self._file('.ctl')}"
        return ["-o", path, "-o", "ControlMaster=no", "-o", "LogLevel=ERROR"]

    def call(self, arguments: Sequence[str]) -> int:
        """Run lorad there on this terminal, and return its exit code. Raises HostUnreachable."""
        terminal = "-t" if sys.stdin.isatty() and sys.stdout.isatty() else "-T"
        words = self.words(arguments, cwd=self.cwd or self.entry.cwd)
        command = ["ssh", *self._session, terminal, "--", self.entry.ssh, words]
        code = _started(lambda: subprocess.run(command, check=False).returncode)
        if code in (_SSH_FAILED, _NOT_FOUND):
            raise self._refusal(code, "")
        return code

    def start_daemon(self) -> None:
        """Start the daemon there. Raises HostUnreachable with what it says."""
        words = self.words(["daemon", "start", "--json"], cwd="")
        code, output = self._ssh(["-T", "--", self.entry.ssh, words], whole=True)
        if code != 0:
            hint = f"`{self.flag} logs --of daemon` shows its log."
            raise HostUnreachable(f"the daemon of {self.name} did not start: {output.strip()}", hint=hint)

    def _ssh(self, arguments: Sequence[str], *, whole: bool = False) -> tuple[int, str]:
        """Call ssh, and return its exit code and what it printed.

        whole: whether the arguments name the host.
        """
        asks = self.asks and sys.stdin.isatty() and sys.stderr.isatty() and "--json" not in sys.argv
        command = ["ssh", *_MASTER, "-o", f"ControlPath={self._file('.ctl')}"]
        command += [] if asks else ["-o", "BatchMode=yes"]
        command += [*arguments] if whole else [*arguments, "--", self.entry.ssh]
        # files: a master that stays in the background would keep a pipe open
        with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
            files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": errors}
            try:
                code = _started(lambda: subprocess.run(command, timeout=_ANSWER_SECONDS, **files).returncode)
            except subprocess.TimeoutExpired:
                return _SSH_FAILED, f"no answer in {_ANSWER_SECONDS:.0f} s"
            file = printed if code == 0 else errors
            file.seek(0)
            return code, file.read().decode(errors="replace")


def _started(run: Any) -> int:
    """Run ssh. Raises HostUnreachable where there is none."""
    try:
        code: int = run()
    except FileNotFoundError:
        raise HostUnreachable("there is no ssh on this machine", hint="Install OpenSSH's client.") from None
    return code


class _BoxTransport(Transport):
    """Sends requests to the daemon of another box, through the socket that a master forwards."""

    def __init__(self, box: FarHome, timeout: float) -> None:
        super().__init__(box.socket, timeout)
        self.box = box
        self.box_name = box.name
        self.restart = f"Start it with `{box.flag} daemon start`."
        self._may_open = timeout >= 1  # nobody waits for ssh while a shell completes a word

    def request(self, method: str, path: str, body: msgspec.Struct | None) -> Any:
        """Send a request. One that only reads is sent once more where the line broke."""
        if body is not None and "cwd" in body.__struct_fields__:
            cwd = send(self, body) if self.box.sends else self.box.directory_for(body)
            body = structs.replace(body, cwd=cwd)
        try:
            return super().request(method, path, body)
        except LineLost:
            if method not in _REPEATABLE:
                raise
            return super().request(method, path, body)
        except Conflict:
            if self.version != __version__:  # it may speak another protocol since the line was opened
                self.box.open(anew=True)
            raise

    def connected(self) -> socket.socket:
        facts = self.box.last_facts()
        if facts is not None and facts.is_dialled and self._may_open:
            return self.box.dial()
        return super().connected()

    def _connect(self, connection: socket.socket) -> None:
        try:
            connection.connect(str(self.socket))
        except (FileNotFoundError, ConnectionRefusedError):
            if not self._may_open:
                raise
            self.box.open()
            connection.connect(str(self.socket))

    def unanswered(self, method: str, path: str, error: Exception) -> LoradError:
        if not self._may_open:
            return super().unanswered(method, path, error)
        if method not in _REPEATABLE:
            return self.broken(method, path, error)
        if not self.box.open(anew=True).running:
            return DaemonUnreachable(f"no daemon runs on {self.box.name}", hint=self.restart)
        hint = f"Call it again; `{self.box.flag} doctor` looks at the daemon there."
        return LineLost(f"the line to {self.box.name} carries nothing: {error}", hint=hint)

    def broken(self, method: str, path: str, error: Exception) -> LoradError:
        if method in _REPEATABLE:
            message = f"the line to {self.box.name}, or the daemon there, went away: {error}"
            return DaemonUnreachable(message, hint="Call it again: the line is opened anew.")
        doubt = f"{method} {path} may have been carried out"
        look = f"Look with `{self.box.flag} list` before you repeat it."
        try:
            if not self._may_open or self.box.open(anew=True).running:
                return LineLost(f"the line to {self.box.name} broke, and {doubt}", hint=look)
        except HostUnreachable as gone:
            return HostUnreachable(f"{gone.message}; {doubt}", hint=f"{gone.hint} {look}")
        message = f"no daemon runs on {self.box.name}; if one did a moment ago, {doubt}"
        return DaemonUnreachable(message, hint=f"{self.restart} {look}")
