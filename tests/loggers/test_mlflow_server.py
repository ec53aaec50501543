"""A real MLflow server that asks for a name and a password."""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorad.box.paths import RunDir
from lorad.errors import SpecError
from lorad.loggers.choose import LoggerChoice, refuse_unfit
from lorad.loggers.export import write_all
from lorad.protocol.journal import JournalWriter
from tests.kit.journals import begin, end, step

MLFLOW = os.environ.get("LORAD_MLFLOW", "")  # the program of `pip install "mlflow[auth]"`
PASSWORD = "a-password-of-ours"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not MLFLOW, reason="LORAD_MLFLOW names no program mlflow of mlflow[auth]"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("mlflow")
    (place / "auth.ini").write_text(
        "[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///auth.db\nadmin_username = admin\n"
        f"admin_password = {PASSWORD}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"MLFLOW_AUTH_CONFIG_PATH": str(place / "auth.ini"), "MLFLOW_FLASK_SERVER_SECRET_KEY": "secret"}
    options = ["--app-name", "basic-auth", "--backend-store-uri", "sqlite:///mlflow.db", "--port", str(port)]
    with (place / "log").open("wb") as log:
        command = [MLFLOW, "server", "--workers", "1", *options]
        started = subprocess.Popen(
            command, cwd=place, env=os.environ | own, stdout=log, stderr=log, process_group=0
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while not is_up(address):
            assert started.poll() is None and time.monotonic() < deadline, (place / "log").read_text()
            time.sleep(0.2)
        yield address
    finally:
        os.killpg(started.pid, 15)
        started.wait(30)


def is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def asked(address: str, path: str, body: Any) -> Any:
    """Ask as the administrator."""
    who = b64encode(f"admin:{PASSWORD}".encode()).decode()
    headers = {"Authorization": f"Basic {who}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/api/2.0/mlflow/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "r")
    directory.root.mkdir()
    with JournalWriter(directory.journal, "r", 1) as writer:
        begin(writer, None)
        for number in (1, 2, 3):
            step(writer, number)
        end(writer, 3, "completed")
    return directory


def choice(server: str, tmp_path: Path, password: str, **others: str) -> LoggerChoice:
    key = tmp_path / "key"
    key.write_text(f"{password}\n")
    key.chmod(0o600)
    return LoggerChoice("mlflow", {"uri": server, "key_file": str(key), **others})


def test_password_of_a_file_lets_it_write(server: str, run: RunDir, tmp_path: Path) -> None:
    write_all(run, choice(server, tmp_path, PASSWORD, user="admin"), tmp_path)
    (found,) = asked(server, "runs/search", {"experiment_ids": ["1"]})["runs"]
    assert found["info"]["status"] == "FINISHED"
    assert {one["step"] for one in found["data"]["metrics"]} == {3}
    assert not {name for name in os.environ if name.startswith("MLFLOW_TRACKING_")}


@pytest.mark.parametrize("wrong", [{"user": "admin"}, {}])
def test_wrong_password_is_said(server: str, run: RunDir, tmp_path: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(Exception, match=r"401|not authenticated"):
        write_all(run, choice(server, tmp_path, "wrong", **wrong), tmp_path)


def test_user_without_a_password_is_refused(server: str) -> None:
    with pytest.raises(SpecError, match="no key_file with the password"):
        refuse_unfit([{"mlflow": {"uri": server, "user": "admin"}}])
