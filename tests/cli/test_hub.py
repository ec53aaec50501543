"""Uploads, by the hub's own client, to a stand-in of the hub's API."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lorad.cli.hub import read_token
from lorad.errors import SpecError

PUSH = "import sys; from pathlib import Path; from lorad.cli.hub import push; "
PUSH += "from lorad.errors import LoradError\n"
PUSH += "try: print(push(Path(sys.argv[1]), 'org/it', private=True, token='hf_x', message='m'))\n"
PUSH += "except LoradError as e: print(type(e).__name__, e.message, '|', e.hint)"


class Hub(ThreadingHTTPServer):
    """Takes what the client sends: what it made, and the files of its commits by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.failures: list[int] = []  # statuses of the next answers
        self.token = "hf_x"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, body: Any = None) -> None:
        data = json.dumps(body or {}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._answer(200, {"id": "org/it", "sha": "0" * 40, "siblings": []})

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[hashlib.sha256(data).hexdigest()] = data
        self._answer(200)

    def do_POST(self) -> None:
        hub, body = self.server, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if hub.failures:
            self._answer(hub.failures.pop(0), {"error": "no"})
        elif self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._answer(401, {"error": "no"})
        elif self.path == "/api/repos/create":
            hub.made.append(json.loads(body))
            self._answer(200, {"url": f"{hub.url}/org/it", "id": "org/it"})
        elif "/preupload/" in self.path:
            modes = {True: "lfs", False: "regular"}
            files = json.loads(body)["files"]
            answers = [
                {"path": f["path"], "uploadMode": modes[f["size"] > 1000], "shouldIgnore": False}
                for f in files
            ]
            self._answer(200, {"files": answers})
        elif self.path.endswith("/info/lfs/objects/batch"):
            self._answer(
                200, {"transfer": "basic", "objects": [self._upload(o) for o in json.loads(body)["objects"]]}
            )
        elif "/commit/" in self.path:
            self._commit([json.loads(line) for line in body.splitlines()])
        else:
            self._answer(200)

    def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return {**wanted, "actions": {"upload": {"href": f"{self.server.url}/put/{wanted['oid']}"}}}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.objects[value["oid"]]
        self._answer(
            200, {"commitUrl": f"{self.server.url}/org/it/commit/1", "commitOid": "1", "success": True}
        )


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A directory with a small and a large file."""
    directory = tmp_path / "exported"
    directory.mkdir()
    (directory / "README.md").write_text("a card")
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (directory / "manifest.json").write_text("{}")
    return directory


def pushed(hub: Hub, directory: Path) -> str:
    """What `push` returns or raises, in a process of its own: the client reads its address when imported."""
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    argv = [sys.executable, "-c", PUSH, str(directory)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_every_file_arrives_whole_in_a_private_repository(hub: Hub, exported: Path) -> None:
    assert pushed(hub, exported) == f"{hub.url}/org/it/commit/1"
    assert hub.made[0]["name"] == "it"
    assert hub.made[0].get("private") or hub.made[0].get("visibility") == "private"
    assert hub.files == {name: (exported / name).read_bytes() for name in ("README.md", "model.safetensors")}


@pytest.mark.system
def test_refusal_says_what_to_do(hub: Hub, exported: Path) -> None:
    hub.token = "hf_another"
    assert pushed(hub, exported).startswith("NotAllowed the hub does not let you write to org/it")
    hub.token, hub.failures = "hf_x", [400]
    said = pushed(hub, exported)
    assert "org/it was not uploaded" in said
    assert f"`hf upload org/it {exported}`" in said
    assert (exported / "model.safetensors").exists()


def test_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hf_secret\n")
    file.chmod(0o644)
    with pytest.raises(SpecError, match="can be read by others") as refused:
        read_token(file)
    assert "hf_secret" not in str(refused.value)
    file.chmod(0o600)
    assert read_token(file) == "hf_secret"
    file.write_text("\n")
    with pytest.raises(SpecError, match="holds no token"):
        read_token(file)
