"""Unix sockets of lorad's processes, for their owner and root alone, and the users behind connections."""

import errno
import os
import pwd
import socket
import struct
from pathlib import Path

from lorad.errors import Conflict

_BACKLOG = 64
ADVICE = "Stop it first; `lorad pools` lists the pools."
DAEMON_UID = "LORAD_DAEMON_UID"  # in the environment of what a shared daemon starts
FOR_ALL = "LORAD_GATEWAY_FOR_ALL"  # in that of its gateway, where everybody may see everything
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
# As <linux/netlink.h>, <linux/sock_diag.h> and <linux/inet_diag.h> have them.
_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST = 1
_ANY = 0xFFFFFFFF
# struct nlmsghdr and inet_diag_req_v2: family, protocol, states, ports, two addresses of 16 bytes, cookie
_DIAG_QUESTION = struct.Struct("=IHHIIBBxxI4s4s12x4s12xIII")
# struct nlmsghdr and inet_diag_msg: kind of the message, uid and inode
_DIAG_ANSWER = struct.Struct("=4xH10x64xII")


def listen(path: Path, mode: int = 0o600, *, advice: str = ADVICE) -> socket.socket:
    """Make a non-blocking listener in the place of a socket that nobody answers. Raises Conflict with
    `advice`.

    It gets its name once it listens and has its mode: a socket that refuses is one whose process is gone.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if answers(path):
        raise Conflict(f"another process answers on {path}", hint=advice)
    unnamed = path.with_name(f"{path.name[:-1]}~")  # no longer: names of sockets are short
    remove(unnamed)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(unnamed))
        unnamed.chmod(mode)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        unnamed.rename(path)
    except OSError:
        listener.close()
        remove(unnamed)
        raise
    return listener


def answers(path: Path) -> bool:
    """Check whether a process listens on a Unix socket, even if its queue of connections is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN)


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def user_name(uid: int) -> str:
    """Find the login name; the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def uid_named(name: str) -> int | None:
    """Find the user of a login name, or of a number as `user_name` has it; None where there is none."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return int(name) if name.isascii() and name.isdecimal() else None


def uid_of(peer: socket.socket) -> int:
    """Find the user of the process at the other end, as the kernel saw it connect (SO_PEERCRED)."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid


def uid_behind(peer: socket.socket) -> int | None:
    """Find the user at the other end of a TCP connection within this machine, by sock_diag(7).

    Returns None where nobody is there any more, or the kernel does not say.
    """
    if peer.family != socket.AF_INET:
        return None
    try:
        their_host, their_port = peer.getpeername()
        our_host, our_port = peer.getsockname()
        ends = struct.pack("!HH", their_port, our_port), *map(socket.inet_aton, (their_host, our_host))
        head = _DIAG_QUESTION.size, _BY_FAMILY, _REQUEST, 0, 0, socket.AF_INET, socket.IPPROTO_TCP
        question = _DIAG_QUESTION.pack(*head, _ANY, *ends, 0, _ANY, _ANY)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
            kernel.send(question)
            answer = kernel.recv(4096)
    except OSError:
        return None
    if len(answer) < _DIAG_ANSWER.size:
        return None
    kind, uid, inode = _DIAG_ANSWER.unpack_from(answer)
    return int(uid) if kind == _BY_FAMILY and inode else None


def may_call(uid: int) -> bool:
    """Check whether a user is this process's, root, or that of a shared daemon which is not root."""
    return uid in (os.getuid(), 0, int(os.environ.get(DAEMON_UID, 0)))
