"""Runs a command in a fork of the warm process: `python -I -S client.py [-u] -m MODULE …`, -c, or a file.

It has the same input, output, directory and environment; signals are passed on, and its exit code is this
one's. Where the environment names no warm process, the command begins as any other. A run of the tests starts
hundreds of these: it takes what C has of sockets and signals, as their modules import for ten milliseconds.
"""

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import os
import sys

PLACE = "LORAD_WARM"  # the variable that names the socket of the warm process
GROUP = "LORAD_CPU_GROUP"  # the variable that names the control group of whoever asks, see cpu_seconds.py
HEAVY_PLACE = ".torch"  # what follows it for the one that has torch
WORKER = "lorad.trainers.ranks.worker"
NAMES = ("lorad.trainers.fsdp.names", "lorad.trainers.megatron.names")
TEMPLATES = "lorad.rl.template_child"
# words of command lines that need it
HEAVY = ("lorad.pool", "-c", "lorad.backends.engine_trial", WORKER, *NAMES)
HEAVY_FILES = "_rank.py"  # which some end with
MESSAGE_BYTES = 1 << 20
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def ask(
    place: str, question: dict[str, object], argv: list[str], fds: list[int]
) -> tuple[socket.socket, int]:
    """Have a process forked; returns the connection, which ends with the process, and its pid.

    argv: what is to run there in the end.

    Raises OSError where no warm process answers.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        is_heavy = any(word in HEAVY or word.endswith(HEAVY_FILES) for word in argv)
        connection.connect(place + HEAVY_PLACE * is_heavy)
        passed = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
        connection.sendmsg(
            [repr(question).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)] if fds else []
        )
        answer = connection.recv(64)
        if not answer:
            raise ConnectionResetError(f"{place}: nothing was forked")
        return connection, int(answer)
    except BaseException:
        connection.close()
        raise


def question(argv: list[str], environment: dict[str, str], cwd: str) -> dict[str, object]:
    """Make the question for a command. argv: what follows `python`."""
    return {"kind": "run", "argv": argv, "env": environment, "cwd": cwd}


def main() -> int:
    if not (place := os.environ.get(PLACE)):
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    asked = question(sys.argv[1:], dict(os.environ), os.getcwd()) | {"umask": os.umask(0)}
    connection, _ = ask(place, asked, sys.argv[1:], [0, 1, 2])
    for number in PASSED_ON:
        signal.signal(number, lambda received, _: connection.send(str(received).encode()))
    code = int(connection.recv(64) or 1)
    if code < 0:  # killed by a signal: so is this
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
