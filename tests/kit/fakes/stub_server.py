"""A server without a model, whose samples and scores follow from the files of adapters; run as a program:
`python stub_server.py SOCKET`.
"""

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

WEIGHTS = "adapter_model.safetensors"
BASE = "base"


def token_of(digest: str) -> int:
    """The one that a version says again and again."""
    return int(digest[:4], 16) % 50 + 5


class Held:
    """What the server holds: name -> (path, sha256)."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.versions: dict[str, tuple[str, str]] = {}

    def load(self, name: str, path: str) -> None:
        data = (Path(path) / WEIGHTS).read_bytes()
        with self.lock:
            self.versions[name] = path, hashlib.sha256(data).hexdigest()

    def digest(self, name: str | None) -> str:
        return hashlib.sha256(b"base").hexdigest() if name is None else self.versions[name][1]


HELD = Held()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/loaded":
            self._say({name: path for name, (path, _) in HELD.versions.items()})
        else:
            self._say({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self._say(self._done(body))
        except (OSError, KeyError) as error:
            self._say({"error": repr(error)}, 400)

    def _done(self, body: dict[str, Any]) -> Any:
        if self.path == "/load":
            return HELD.load(body["name"], body["path"])
        if self.path == "/unload":
            return HELD.versions.pop(body["name"])
        digest = HELD.digest(body["version"])
        if self.path == "/score":
            return -int(digest[:4], 16) / 65536
        time.sleep(body["seconds"])
        return token_of(digest)

    def _say(self, answer: Any, status: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def address_string(self) -> str:
        return "somebody"

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, flush=True)


class Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True


if __name__ == "__main__":
    print("stub server starts", flush=True)
    Server(sys.argv[1], Handler).serve_forever()
