"""A stand-in of the hub on the loopback: one dataset, whose files can change, and which can fail."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

NAME = "org/rows"
_API, _FILES = f"/api/datasets/{NAME}", f"/datasets/{NAME}/resolve/"


class Hub:
    """revisions: the files of each, the newest last. failing: so many answers from now on break off."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.revisions = {hashlib.sha1(b"0").hexdigest(): files}
        self.failing = self.answers = 0
        hub = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                hub.answers += 1
                self.breaks = hub.failing > 0
                hub.failing -= self.breaks
                hub.answer(self)

            do_HEAD = do_POST = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def push(self, files: dict[str, bytes]) -> None:
        """Make another revision the newest."""
        self.revisions[hashlib.sha1(str(len(self.revisions)).encode()).hexdigest()] = files

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: "_Handler") -> None:
        url = urlparse(request.path)
        path, newest = unquote(url.path), next(reversed(self.revisions))
        if path.startswith(_FILES):
            revision, _, name = path.removeprefix(_FILES).partition("/")
            files = self.revisions.get(newest if revision == "main" else revision, {})
            request.file(files.get(name), newest if revision == "main" else revision)
        elif not path.startswith(_API):
            request.answer(404, b"")
        elif path.startswith(f"{_API}/tree/"):
            revision, _, folder = path.removeprefix(f"{_API}/tree/").partition("/")
            request.json(_listed(self.revisions[revision], folder))
        elif path.startswith(f"{_API}/paths-info/"):
            files = self.revisions[path.rpartition("/")[2]]
            request.json([_entry(files, name) for name in request.asked() if name in files])
        else:
            revision = path.rpartition("/")[2] if "/revision/" in path else newest
            named = [{"rfilename": name} for name in self.revisions[revision]]
            request.json({"id": NAME, "sha": revision, "siblings": named, "private": False, "tags": []})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    breaks = False

    def log_message(self, *_: object) -> None:
        pass

    def asked(self) -> list[str]:
        asked: list[str] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
        return asked

    def json(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def file(self, data: bytes | None, revision: str) -> None:
        if data is None:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        about = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": revision}
        if (wanted := self.headers["Range"]) is None:
            self.answer(200, data, about)
            return
        first, last = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
        whole = {"Content-Range": f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"}
        self.answer(206, data[first : last + 1], about | whole)

    def answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        if self.breaks:
            self.close_connection = True
            return
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(files: dict[str, bytes], name: str) -> dict[str, Any]:
    data = files[name]
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


def _listed(files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
    inside = f"{folder}/" if folder else ""
    rest = {name: name.removeprefix(inside) for name in files if name.startswith(inside)}
    folders = sorted({inside + part.split("/")[0] for part in rest.values() if "/" in part})
    found = [{"type": "directory", "path": name, "oid": "0" * 40} for name in folders]
    return found + [_entry(files, name) for name, part in rest.items() if "/" not in part]


@contextmanager
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    made = Hub(files)
    try:
        yield made
    finally:
        made.close()
