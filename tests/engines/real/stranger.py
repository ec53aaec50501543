"""python stranger.py UID: what can that user do? Standard library only.

stdin: {"sockets": [path], "ports": [[host, port]], "paths": [path], "routes": [[method, route]]}.
stdout: {"sockets": {path: outcome}, "ports": {"host:port method route": outcome}, "paths": {path: outcome}};
an outcome is "HTTP 200", "EACCES", "reset": what a request or a look got.

It is started as root and takes the user's identity itself: the user need not be able to read this file or
Python.
"""

import encodings.idna  # noqa: F401 - what is imported later may be out of the user's reach
import errno
import http.client
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

PATIENCE = 3.0  # seconds: a port that takes a request and says nothing is none that serves it
AT_ONCE = 64
BODY = json.dumps(
    {"lora_name": "theirs", "lora_path": "/nowhere", "name": "theirs", "src": "/nowhere", "text": "x"}
)


def become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.chdir("/")


def over_socket(path: str, method: str, route: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        return asked(connection, path, method, route)


def over_port(host: str, port: int, method: str, route: str) -> str:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as connection:
        return asked(connection, (host, port), method, route)


def asked(connection: socket.socket, address: str | tuple[str, int], method: str, route: str) -> str:
    client = http.client.HTTPConnection("localhost")
    try:
        connection.settimeout(PATIENCE)
        connection.connect(address)
        client.sock = connection
        body = BODY if method == "POST" else None
        client.request(method, route, body, {"Content-Type": "application/json"})
        return f"HTTP {client.getresponse().status}"
    except TimeoutError:
        return "silent"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, type(error).__name__)
    except http.client.HTTPException as error:
        return type(error).__name__


def looked(path: str) -> str:
    """Listed, when it is a directory; else read."""
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            with open(path, "rb") as file:
                file.read(1)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "read"


def main() -> None:
    plan = json.load(sys.stdin)
    become(int(sys.argv[1]))
    tries = {
        f"{host}:{port} {way} {route}": (host, port, way, route)
        for host, port in plan["ports"]
        for way, route in plan["routes"]
    }
    answers = {
        "sockets": {path: over_socket(path, *plan["routes"][0]) for path in plan["sockets"]},
        "ports": dict(zip(tries, at_once(over_port, tries.values()), strict=True)),
        "paths": {path: looked(path) for path in plan["paths"]},
    }
    json.dump(answers, sys.stdout)


def at_once(function: Callable[..., str], arguments: Iterable[tuple[object, ...]]) -> list[str]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(lambda values: function(*values), arguments))


if __name__ == "__main__":
    main()
