"""`python -I offline.py COMMAND…` runs a command that has no network but a loopback of its own.

Where the kernel refuses such a namespace, whatever honours proxies is sent to a port that nobody listens on.
Which of both it is, is the first line of stderr.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
NOBODY_LISTENS = "http://127.0.0.1:9"


def leave_the_network() -> bool:
    """Move this process into a network namespace with a loopback; returns whether the kernel allows it.

    A user who may not do so alone does it in a user namespace, in which the user stays the same.
    """
    libc, user, group = ctypes.CDLL(None), os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNET):
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
            return False
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP | IFF_RUNNING))
    return True


def main() -> None:
    if leave_the_network():
        print("==> without a network: a namespace with a loopback alone", file=sys.stderr, flush=True)
    else:
        print("==> no namespace can be made: proxies lead nowhere", file=sys.stderr, flush=True)
        os.environ |= dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), NOBODY_LISTENS)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
