"""The first word with a Ray cluster, of which the modules that lorad asks are stood in for; `tests/cluster`
has the real one.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.world import REPOSITORY

# as the real one, it reads the environment when it is imported
RAYLET = """
import os
from ray.exceptions import AuthenticationError

class Config:
    mode = os.environ.get("RAY_AUTH_MODE", "disabled")

    @classmethod
    def initialize(cls, text):
        cls.mode = os.environ["RAY_AUTH_MODE"]

class GcsClient:
    def __init__(self, address):
        has = open(os.environ["RAY_AUTH_TOKEN_PATH"]).read() if Config.mode == "token" else ""
        if os.environ["TOKEN"] not in ("", has):
            raise AuthenticationError
"""
RAY = {
    "__init__.py": "import ray._private.services, ray._raylet",
    "_raylet.py": RAYLET,
    "exceptions.py": "class AuthenticationError(Exception): pass",
    "_private/__init__.py": "",
    "_private/services.py": "canonicalize_bootstrap_address = str",
}
REACH = """
import json, os, ray, sys
from lorad.grants.ray_token import RefusedError, reach
try:
    where = reach(None, json.loads(sys.argv[1]), ray)
    print(where, os.environ["RAY_AUTH_MODE"], ray._raylet.Config.mode)
except RefusedError as error:
    print(error.words)
"""


@pytest.fixture
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def reached(folder: Path, address: str, token: str, *, insecure: bool = False) -> str:
    """Ask a cluster with that token, "" if it is open to all, with another; returns what came of it."""
    (folder / "token").write_text("ab")
    (folder / "token").chmod(0o600)
    setup = {"address": address, "token_file": str(folder / "token"), "insecure": insecure}
    env = {"PYTHONPATH": f"{folder}:{REPOSITORY}", "TOKEN": token}
    argv = [sys.executable, "-P", "-c", REACH, json.dumps(setup)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def with_ray(tmp_path: Path) -> Path:
    for name, text in RAY.items():
        (tmp_path / "ray" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ray" / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("token", "insecure", "words"),
    [
        ("ab", False, "{} token token"),
        ("cd", False, "Ray at {} refuses the token of {}/token"),
        ("", False, "the Ray cluster at {} asks for no token: whoever reaches its ports runs programs on it"),
        ("", True, "{} disabled disabled"),
        ("ab", True, "{} token token"),
    ],
)
def test_a_cluster_is_reached_by_its_token(
    with_ray: Path, address: str, token: str, insecure: bool, words: str
) -> None:
    assert reached(with_ray, address, token, insecure=insecure) == words.format(address, with_ray)


def test_an_interpreter_without_ray_is_named(tmp_path: Path) -> None:
    setup = {"life": "p@1", "setup": {"kind": "ray"}, "socket": str(tmp_path / "s")}
    (tmp_path / "grant.json").write_text(json.dumps(setup))
    argv = [sys.executable, "-P", "-m", "lorad.grants.ray", str(tmp_path / "grant.json")]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        grant = subprocess.Popen(argv, env={"PYTHONPATH": str(REPOSITORY)})
        with grant, listener.accept()[0] as connection, connection.makefile() as lines:
            refused = json.loads(lines.readline())
    assert refused["kind"] == "Refused" and grant.returncode == 4
    assert refused["words"].startswith(f"{sys.executable} has no Ray that can be imported: ModuleNotFound")
