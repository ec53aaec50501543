"""The port that a gateway chooses on 127.0.0.1, and the key of its owner."""

import contextlib
import os
import resource
import socket
from pathlib import Path

import httpx2
import openai as sdk
import pytest
from openai import OpenAI

from lorad.box.config import GatewaySettings
from lorad.box.keys import gateway_key
from lorad.box.paths import Home
from lorad.gateway.own.port import open_port
from lorad.http import bounded
from tests.kit.gateway_kit import World, entry, greedy, http, running_gateway, write_table

pytest_plugins = ["tests.kit.gateway_fixtures"]


@pytest.fixture
def own(home: Path, world: World) -> Home:
    """A home that serves, without a gateway yet."""
    made = Home(home)
    write_table(made, {"bot": "sorter@0"}, {"sorter@0": entry(world.running, world.root, world.versions[0])})
    return made


def port_of(home: Home) -> int:
    return int(home.gateway_port.read_text())


def asked(home: Home, key: str) -> str:
    with httpx2.Client() as inner:
        url = f"http://127.0.0.1:{port_of(home)}/v1"
        return greedy(OpenAI(base_url=url, api_key=key, http_client=inner, max_retries=0), "bot")


def test_the_key_lets_in_and_nothing_else(own: Home) -> None:
    with running_gateway(own):
        assert asked(own, own.gateway_key.read_text())
        for wrong in ("none", own.gateway_key.read_text()[:-1], "sk-lorad-"):
            with pytest.raises(sdk.AuthenticationError):
                asked(own, wrong)
        url = f"http://127.0.0.1:{port_of(own)}/v1/chat/completions"
        assert httpx2.post(url, json={"model": "bot"}).status_code == 401
        for strange in (b"", b"Bearer \xff\xfe"):
            headers = {b"Authorization": strange}
            assert httpx2.get(url.replace("chat/completions", "models"), headers=headers).status_code == 401


def test_port_and_key_outlive_the_gateway(own: Home) -> None:
    with running_gateway(own):
        before = port_of(own), own.gateway_key.read_text()
    with running_gateway(own):
        assert (port_of(own), own.gateway_key.read_text()) == before and asked(own, before[1])


def test_a_taken_port_gets_another_key_too(own: Home) -> None:
    with running_gateway(own):
        port, key = port_of(own), own.gateway_key.read_text()
    with socket.create_server(("127.0.0.1", port)), running_gateway(own):
        assert port_of(own) != port and asked(own, own.gateway_key.read_text())
        with pytest.raises(sdk.AuthenticationError):
            asked(own, key)


def test_only_the_owner_can_read_the_key(own: Home) -> None:
    key = gateway_key(own)
    assert own.gateway_key.stat().st_mode & 0o777 == 0o600 and gateway_key(own) == key
    own.gateway_key.chmod(0o640)
    assert gateway_key(own) != key and own.gateway_key.stat().st_mode & 0o777 == 0o600


def test_a_linked_key_is_replaced(own: Home, tmp_path: Path) -> None:
    own.gateway.mkdir(exist_ok=True)
    (tmp_path / "known").write_text("sk-lorad-known")
    (tmp_path / "known").chmod(0o600)
    own.gateway_key.symlink_to(tmp_path / "known")
    assert gateway_key(own) != "sk-lorad-known" and not own.gateway_key.is_symlink()


def test_null_is_no_port(own: Home) -> None:
    with running_gateway(own, GatewaySettings(None)):
        assert not own.gateway_port.exists() and not own.gateway_key.exists()


def test_a_living_gateway_keeps_its_port(own: Home) -> None:
    with running_gateway(own):
        before = port_of(own), own.gateway_key.read_text()
        assert open_port(own) is None
        assert (port_of(own), own.gateway_key.read_text()) == before and asked(own, before[1])


@pytest.mark.parametrize("written", ["", "no number", "70000", "-1"])
def test_a_damaged_record_of_the_port_is_replaced(own: Home, written: str) -> None:
    own.gateway_port.write_text(written)
    with running_gateway(own):
        assert asked(own, own.gateway_key.read_text())


def test_strangers_leave_the_socket_room(own: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = len(os.listdir("/proc/self/fd")) + 40
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    monkeypatch.setattr(bounded, "uid_behind", lambda peer: None)  # as of another machine, through a tunnel
    with running_gateway(own), contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(own))))
        with http(own) as client:
            assert client.get("/v1/models").status_code == 200
