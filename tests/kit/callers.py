"""Clients that are processes of other users: `python -m tests.kit.callers UID` asks what it reads, one line
each.
"""

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from lorad.box.paths import Home, default_home


class UnixConnection(http.client.HTTPConnection):
    """A connection to a socket in the filesystem."""

    def __init__(self, path: Path, timeout: float | None) -> None:
        super().__init__("lorad", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class CallerOf:
    """A process of `uid` that sends requests to the daemon of a home."""

    def __init__(self, uid: int, home: Path) -> None:
        self.uid = uid
        self.home = home
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(uid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"LORAD_HOME": str(home)},
        )

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and body; of a stream, its lines until it has no more to say."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, path, body]).encode() + b"\n")
        self._process.stdin.flush()
        status, answer = json.loads(self._process.stdout.readline())
        return status, answer

    def close(self) -> None:
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def become(uid: int) -> None:
    """Make this process one of another user's."""
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def main() -> None:
    become(int(sys.argv[1]))
    socket = Home(default_home()).socket
    for line in sys.stdin:
        print(json.dumps(asked(socket, *json.loads(line))), flush=True)


def asked(socket: Path, method: str, path: str, body: Any) -> tuple[int, Any]:
    connection = UnixConnection(socket, 120)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        kind = response.getheader("Content-Type") or ""
        if "ndjson" in kind:
            return response.status, list(_lines(response))
        text = response.read().decode()
        return response.status, json.loads(text) if "json" in kind else text
    finally:
        connection.close()


def _lines(response: http.client.HTTPResponse) -> Iterator[Any]:
    """Yield the lines of a stream up to the one that says that nothing happens, or its end."""
    while line := response.readline():
        yield json.loads(line)
        if b'"idle"' in line:
            return


if __name__ == "__main__":
    main()
