"""Hosts on one machine, with a network, processes, /tmp, /dev/shm, hostname and boot id of their own.

Needs root. A host shares the kernel, the CPUs and the files outside /tmp and /dev/shm. No host sees another's
/tmp; of this machine's own /tmp or /dev/shm, a host sees the directories in `sees`.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

_BRIDGE, _NET = "lrb0", "10.77.0"
_INIT = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes away orphans that end
os.read(0, 1)
"""
_BOOT = """
set -e
mount -t tmpfs -o size=2g tmp {root}
mkdir -m 1777 {root}/tmp {root}/shm
mount -t tmpfs -o size=1500m shm {root}/shm
for seen in {sees}; do mkdir -p "{root}/${{seen#/dev/}}"; mount --bind "$seen" "{root}/${{seen#/dev/}}"; done
echo {boot_id} > {root}/boot_id
mount --rbind {root}/shm /dev/shm
mount --bind {root}/boot_id /proc/sys/kernel/random/boot_id
mount --rbind {root}/tmp /tmp
hostname {name}
ip link set lo up
exec {python} -c {init}
"""
_NAMESPACES = ("-m", "-p", "-n", "-u", "-i")
T = TypeVar("T")


def can_be_made() -> bool:
    """Report whether this process may make hosts: it is root, and the kernel and the tools allow it."""
    if os.getuid() != 0 or not all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip")):
        return False
    probe = ["unshare", *_NAMESPACES, "--fork", "--mount-proc"]
    devices = (
        "ip link add p0 type bridge",
        "ip link add p1 type veth peer name p2",
        "ip link set p1 master p0",
    )
    script = " && ".join(["mount -t tmpfs probe /mnt", *devices])
    return subprocess.run([*probe, "sh", "-c", script], capture_output=True, check=False).returncode == 0


def until(probe: Callable[[], T], what: str, seconds: float = 20.0) -> T:
    """Return what `probe` gives as soon as it is true. Raises AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not (found := probe()):
        assert time.monotonic() < end, f"no {what} within {seconds:.0f} s"
        time.sleep(0.05)
    return found


class Host:
    """One host, up from its making and gone with the process that made it.

    `cut` is a power cut; `boot` brings it back, empty and with another boot id.
    """

    def __init__(self, index: int, sees: Sequence[Path] = ()) -> None:
        self.name, self.ip, self._sees = f"h{index}", f"{_NET}.{10 + index}", sees
        self._link, self._root = f"lrv{index}", Path(f"/run/lr-host-{index}")
        self.pid = 0  # of its PID 1, as this machine counts
        self.boot()

    def boot(self) -> None:
        self._root.mkdir(exist_ok=True)
        script = _BOOT.format(
            root=self._root,
            sees=" ".join(shlex.quote(str(path)) for path in self._sees),
            boot_id=uuid.uuid4(),
            name=self.name,
            python=sys.executable,
            init=shlex.quote(_INIT),
        )
        command = ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "--propagation", "private"]
        self._outside = subprocess.Popen(
            [*command, "bash", "-c", script], stdin=subprocess.PIPE, start_new_session=True
        )
        children = Path(f"/proc/{self._outside.pid}/task/{self._outside.pid}/children")
        until(
            lambda: self._outside.poll() is None and b"SIG_IGN" in _command(self._first(children)),
            f"host {self.name}",
        )
        self.pid = self._first(children)
        self._network = os.readlink(f"/proc/{self.pid}/ns/net")
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        _run("ip", "link", "set", self._link, "master", _BRIDGE, "up")
        inside = ["nsenter", "-t", str(self.pid), "-n", "ip"]
        _run(*inside, "addr", "add", f"{self.ip}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "route", "add", "default", "via", f"{_NET}.1")

    def cut(self) -> None:
        """Kill every process of the host at once, as a power cut does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._outside.communicate()

    def part(self) -> None:
        """Take the host off the network; nobody is told."""
        _run("ip", "link", "set", self._link, "down")

    def heal(self) -> None:
        _run("ip", "link", "set", self._link, "up")

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Have no room left on the host's disk, which is also its /tmp and /dev/shm."""
        places, sizes = [str(self._root), f"{self._root}/shm"], ["2g", "1500m"]
        for place in places:
            used = int(self.run("df", "--output=used", "-B4096", place).split()[-1])
            self.run("mount", "-o", f"remount,size={max(1, used) * 4096}", place)
        try:
            yield
        finally:
            for place, size in zip(places, sizes, strict=True):
                self.run("mount", "-o", f"remount,size={size}", place)

    def argv(self, *command: str) -> list[str]:
        """Return a command that runs `command` on the host."""
        return ["nsenter", "-t", str(self.pid), *_NAMESPACES, "--", *command]

    def run(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Run a command on the host; returns its output. Raises CalledProcessError."""
        done = subprocess.run(
            self.argv(*command),
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command} on {self.name}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command on the host, in a session of its own: the kernel shares CPUs by session."""
        return subprocess.Popen(self.argv(*command), text=True, start_new_session=True, **options)

    def processes(self) -> dict[int, str]:
        """Map each living process of the host, by the pid that this machine gives it, to its command line."""
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/net") != self._network or _is_dead(name):
                    continue
                line = _command(int(name)).replace(b"\0", b" ").decode(errors="replace")
                if line and not line.startswith(("nsenter ", "unshare ")):
                    found[int(name)] = line
        return found

    def _first(self, children: Path) -> int:
        with contextlib.suppress(OSError):
            return int((children.read_text().split() or ["0"])[0])
        return 0


@contextlib.contextmanager
def hosts(
    number: int, sees: Sequence[Path] = (), homes: Sequence[int] = (0,), programs: Sequence[Path] = ()
) -> Iterator[list[Host]]:
    """Make `number` hosts on a bridge; those of `homes` see the directories `sees`.

    programs: directories that every host needs; those below /tmp or /dev/shm would be hidden from it.
    """
    hidden = {path for path in programs if path.parts[1:2] == ("tmp",) or path.parts[1:3] == ("dev", "shm")}
    needed = [path for path in sorted(hidden) if not hidden & {*path.parents}]
    _remove(number)
    _run("ip", "link", "add", _BRIDGE, "type", "bridge")
    made: list[Host] = []
    try:
        _run("ip", "addr", "add", f"{_NET}.1/24", "dev", _BRIDGE)
        _run("ip", "link", "set", _BRIDGE, "up")
        for index in range(number):
            made.append(Host(index, [*needed, *(sees if index in homes else ())]))
        yield made
    finally:
        for host in made:
            host.cut()
        _remove(number)


def _remove(number: int) -> None:
    """Remove the links, also those that a test run which was killed left."""
    for link in (*(f"lrv{index}" for index in range(number)), _BRIDGE):
        subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)
    for index in range(number):
        with contextlib.suppress(OSError):
            Path(f"/run/lr-host-{index}").rmdir()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _is_dead(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
