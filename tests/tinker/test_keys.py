"""Keys of the door: made, listed, revoked; only their sha256 is kept."""

import hashlib
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lorad.box.config import TinkerSettings
from lorad.box.keys import keep_own_key, keys_file, make_key, own_key, read_keys, revoke_key
from lorad.box.paths import Home
from lorad.cli.commands.tinker import door
from lorad.errors import DaemonUnreachable, NotFound, SpecError
from lorad.tinker.door.errors import HttpError
from lorad.tinker.door.guard import Keys
from tests.kit.world import World


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return keys_file(Home(tmp_path / "home"), TinkerSettings())


def test_a_key_works_until_it_is_revoked(path: Path) -> None:
    first, second = make_key(path, "alice"), make_key(path, "bob")
    keys = Keys(path)
    assert first.startswith("tml-") and len(first) > 40
    assert (keys.owner(first), keys.owner(second)) == ("alice", "bob")
    assert revoke_key(path, hashlib.sha256(first.encode()).hexdigest()[:12]) == "alice"
    with pytest.raises(HttpError):
        keys.owner(first)
    assert keys.owner(second) == "bob" and list(read_keys(path)) == ["bob"]


def test_the_file_has_digests_alone(path: Path) -> None:
    key = make_key(path, "alice")
    assert key not in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keys_made_at_once_are_all_there(path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = [*threads.map(lambda _: make_key(path, "alice"), range(24))]
    assert len(read_keys(path)["alice"]) == len(set(made)) == 24


@pytest.mark.parametrize("beginning", ["", "zz"])
def test_what_names_no_single_key_revokes_none(path: Path, beginning: str) -> None:
    for owner in ("alice", "bob"):
        make_key(path, owner)
    before = read_keys(path)
    with pytest.raises(NotFound):
        revoke_key(path, beginning)
    assert read_keys(path) == before


def test_a_user_has_one_key_for_each_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    homes, file = (Home(tmp_path / "a"), Home(tmp_path / "b")), tmp_path / "lorad" / "tinker-keys.json"
    assert own_key(homes[0]) == ""
    for key in ("tml-first", "tml-second"):
        keep_own_key(homes[0], key)
    keep_own_key(homes[1], "tml-other")
    assert [own_key(home) for home in homes] == ["tml-second", "tml-other"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(SpecError, match="readable by others"):
        own_key(homes[0])


@pytest.mark.parametrize(
    ("base", "endpoint", "found"),
    [("builtin:tiny", "", True), ("a/b@main", "", False), ("/models/b", "https://mirror", False)],
)
def test_the_hub_is_the_door_where_it_must(
    base: str, endpoint: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    settings = TinkerSettings(8093, bases={"a/b": base, "not/served": "/models/c"})
    assert door.not_on_the_hub(settings, ["a/b"]) == ["a/b"] * found


class OtherProgram(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, *_: object) -> None:
        pass


def test_another_program_on_the_port_is_named() -> None:
    with HTTPServer(("127.0.0.1", 0), OtherProgram) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.handle_request)
        with pytest.raises(DaemonUnreachable, match="as no door of lorad does"):
            door._answer(TinkerSettings(server.server_port), "tml-a-key-of-nobody")


def test_commands_make_list_and_revoke() -> None:
    made = World()
    try:
        key = made.lorad("tinker", "keys", "make", "alice").stdout.strip()
        ((owner, sha256),) = [
            row.values() for row in json.loads(made.lorad("tinker", "keys", "--json").stdout)
        ]
        assert (owner, sha256) == ("alice", hashlib.sha256(key.encode()).hexdigest())
        made.lorad("tinker", "keys", "revoke", sha256[:12])
        assert "No keys" in made.lorad("tinker", "keys").stderr
        assert "tinker.port" in made.lorad("tinker", "env", expect=2).stderr
    finally:
        made.close()
