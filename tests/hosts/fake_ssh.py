"""An `ssh` for tests: it runs the command on this machine, and a master of its own forwards sockets.

It understands what lorad asks of OpenSSH: options by -o, -O check, forward, cancel and exit, -L, -t and -T.
`FAKE_SSH_SAYS` is what it prints instead of connecting; `FAKE_SSH_CALLS` is a file with a line for each call.
With `FAKE_SSH_CLOSED` no connection to a forwarded socket is carried.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_FAILED = 255


def main(words: list[str]) -> int:
    """Do what `ssh WORDS` would. Returns its exit code."""
    with open(os.environ["FAKE_SSH_CALLS"], "a") as calls:
        calls.write(" ".join(words) + "\n")
    options: dict[str, str] = {}
    while words and words[0] != "--":
        word = words.pop(0)
        if word == "-o":
            name, _, value = words.pop(0).partition("=")
            options[name] = value
        elif word in ("-O", "-L"):
            options[word] = words.pop(0)
    control = Path(options["ControlPath"])
    if "-O" in options:
        return _asked(control, options["-O"], options.get("-L", ""))
    if says := os.environ.get("FAKE_SSH_SAYS"):
        print(says, file=sys.stderr)
        return _FAILED
    if options["ControlMaster"] == "auto":
        _start_master(control)
    environment = {name: value for name, value in os.environ.items() if name != "LORAD_HOST"}
    return subprocess.run(["sh", "-c", words[2]], env=environment, check=False).returncode


def _asked(control: Path, verb: str, forward: str) -> int:
    try:
        with socket.socket(socket.AF_UNIX) as master:
            master.connect(str(control))
            master.sendall(json.dumps([verb, forward]).encode())
            answer = json.loads(master.recv(1 << 16))
    except (OSError, ValueError) as error:
        print(f"Control socket connect({control}): {error}", file=sys.stderr)
        return _FAILED
    print(f"Master running (pid={answer})", file=sys.stderr)
    return 0


def _start_master(control: Path) -> None:
    """Leave a master in the background, unless one answers."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as trial:
        trial.connect(str(control))
        return
    control.unlink(missing_ok=True)
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-S", __file__, "--master", str(control)]
    subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)
    while not control.exists():
        time.sleep(0.01)


def serve(control: Path) -> None:
    """Be a master until it is asked to exit."""
    listeners: dict[str, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as inbox:
        hidden = control.with_suffix(".new")
        inbox.bind(str(hidden))
        inbox.listen()
        hidden.rename(control)  # as ssh does: a socket that has its name answers
        while True:
            asker, _ = inbox.accept()
            with asker, contextlib.suppress(OSError, ValueError):
                verb, forward = json.loads(asker.recv(1 << 16))
                if verb == "forward":
                    here, _, there = forward.partition(":")
                    listeners[forward] = _listen(here, there)
                elif verb == "cancel" and forward in listeners:
                    listeners.pop(forward).close()
                asker.sendall(json.dumps(os.getpid()).encode())
                if verb == "exit":
                    control.unlink()
                    os._exit(0)


def _listen(here: str, there: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    Path(here).unlink(missing_ok=True)
    listener.bind(here)
    listener.listen(64)
    threading.Thread(target=_accept, args=(listener, there), daemon=True).start()
    return listener


def _accept(listener: socket.socket, there: str) -> None:
    with contextlib.suppress(OSError):
        while True:
            near, _ = listener.accept()
            far = socket.socket(socket.AF_UNIX)
            try:
                if "FAKE_SSH_CLOSED" in os.environ:
                    raise PermissionError("administratively prohibited")
                far.connect(there)
            except OSError:  # as ssh: the connection is taken, and then closed
                near.close()
                far.close()
                continue
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_relay, args=(source, target), daemon=True).start()


def _relay(source: Any, target: Any) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--master"]:
        serve(Path(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
