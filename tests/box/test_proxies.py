"""Requests to this machine itself go to no proxy."""

import urllib.request

import pytest

from lorad.box.proxies import past_proxies
from lorad.children.user_process import environment

PROXY = {"http_proxy": "http://proxy:3128"}
ALL = "127.0.0.1,localhost,0.0.0.0"


@pytest.mark.parametrize(
    ("given", "no_proxy"),
    [
        ({}, None),
        ({"NO_PROXY": "corp.example"}, None),
        ({"http_proxy": ""}, None),
        (PROXY, ALL),
        ({"ALL_PROXY": "socks5://proxy:1080"}, ALL),
        (PROXY | {"NO_PROXY": "corp.example, localhost"}, "corp.example,localhost,127.0.0.1,0.0.0.0"),
        (PROXY | {"no_proxy": "a.example", "NO_PROXY": "b.example"}, f"a.example,{ALL}"),
        (PROXY | {"no_proxy": "*"}, None),
        (PROXY | {"no_proxy": ALL}, None),
    ],
)
def test_loopback_is_added_beside_a_proxy(given: dict[str, str], no_proxy: str | None) -> None:
    wanted = {} if no_proxy is None else {"no_proxy": no_proxy, "NO_PROXY": no_proxy}
    assert past_proxies(given) == wanted


def test_user_code_asks_this_machine_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(PROXY | {"NO_PROXY": "corp.example"}, []).items():
        monkeypatch.setenv(name, value)
    assert all(map(urllib.request.proxy_bypass, ("localhost", "127.0.0.1:8000", "corp.example")))
    assert not urllib.request.proxy_bypass("judge.example")
