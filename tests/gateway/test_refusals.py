"""What the gateway refuses, and how it says so: parameters, models, strangers, more than it takes."""

import asyncio
import contextlib
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import openai as sdk
import pytest
from openai import OpenAI

from lorad.box.config import GatewaySettings
from lorad.box.paths import Home
from lorad.evaluation.door import opened
from tests.kit.gateway_kit import World, entry, greedy, http, running_gateway, write_table
from tests.kit.pool_kit import DEADLINE, TINY, until

pytest_plugins = ["tests.kit.gateway_fixtures"]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"best_of": 3}, "best_of"),
        ({"temperature": 3.0}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 5000}, "prompt"),
        ({"prompt": [1, 99999]}, "prompt"),
        ({"stop": ""}, "stop"),
        ({"model": "a" * 5000}, "model"),
        ({"extra_body": {"min_p": 0.1}}, "min_p"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client: OpenAI, extra: dict[str, Any], param: str) -> None:
    with pytest.raises(sdk.BadRequestError) as caught:
        client.completions.create(**({"model": "bot", "prompt": "1"} | extra))
    assert caught.value.param == param


def test_a_chat_refuses_what_its_engine_cannot(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "1"}]
    tool: Any = {"type": "function", "function": {"name": "f"}}
    formats = [{"type": "json_object"}, {"type": "grammar"}, {"type": "json_schema"}]
    extras: list[Any] = [{"tools": [tool]}, {"top_logprobs": 3}, *({"response_format": f} for f in formats)]
    for extra in extras:
        with pytest.raises(sdk.BadRequestError) as caught:
            client.chat.completions.create(model="bot", messages=messages, **extra)
        assert caught.value.param == next(iter(extra))


def test_what_changes_nothing_is_ignored(client: OpenAI) -> None:
    neutral: dict[str, Any] = {
        "user": "me",
        "frequency_penalty": 0,
        "logit_bias": {},
        "best_of": 1,
        "echo": False,
    }
    assert greedy(client, "bot", **neutral) == greedy(client, "bot", extra_body={"top_k": 0})


def test_unknown_model_is_not_found_without_daemon(client: OpenAI) -> None:
    with pytest.raises(sdk.NotFoundError):
        client.completions.create(model="nobody", prompt="1")
    with pytest.raises(sdk.InternalServerError) as caught:  # an unpinned version may well be there
        client.completions.create(model="sorter@7", prompt="1")
    assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "2")


def test_strange_requests_get_errors_of_one_shape(world: World) -> None:
    with http(world.home) as plain:
        answers = [
            plain.post("/v1/completions", content=b"{"),
            plain.post("/v1/completions", json=[1]),
            plain.post("/v1/completions", content=b'{"model": "bot", "prompt": "\xff"}'),
            plain.post("/v1/completions", content=b" " * (9 << 20)),
            plain.get("/v1/completions"),
            plain.get("/nothing"),
        ]
    assert [answer.status_code for answer in answers] == [400, 400, 400, 413, 405, 404]
    assert all(set(answer.json()["error"]) == {"message", "type", "param", "code"} for answer in answers)


def test_a_model_without_template_has_no_chat(client: OpenAI, world: World, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "tiny")
    (tmp_path / "tiny" / "chat_template.jinja").unlink()
    plain = entry(world.running, world.root, world.versions[0], model_path=str(tmp_path / "tiny"))
    write_table(world.home, {"plain": "sorter@0"}, {"sorter@0": plain})
    messages: Any = [{"role": "user", "content": "1"}]
    with pytest.raises(sdk.BadRequestError, match="use /v1/completions"):
        client.chat.completions.create(model="plain", messages=messages)


SLOW = (
    "{% if messages[0].content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{{ messages[0].content }}{{ extra }}"
)


async def test_the_port_of_a_suite_wants_its_key(world: World) -> None:
    async with opened(str(world.home.gateway_socket)) as door, aiohttp.ClientSession(door.url) as session:
        for key, status in (("guess", 401), ("", 401), (door.key, 200)):
            async with session.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) as answer:
                assert answer.status == status
        headers = {b"Authorization": b"Bearer \xff\xfe"}
        answered = await asyncio.to_thread(httpx2.get, f"{door.url}/v1/models", headers=headers)
        assert answered.status_code == 401


@pytest.mark.system
def test_endless_template_is_cut(
    client: OpenAI, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings of a request reach the template, and the next request is answered by another process."""
    monkeypatch.setattr("lorad.rl.tokenizer.TEMPLATE_SECONDS", 0.5)
    shutil.copytree(TINY, tmp_path / "tiny")
    (tmp_path / "tiny" / "chat_template.jinja").write_text(SLOW)
    slow = entry(world.running, world.root, world.versions[0], model_path=str(tmp_path / "tiny"))
    plain = entry(world.running, world.root, world.versions[0])
    write_table(world.home, {"slow": "sorter@0", "bot": "sorter@1"}, {"sorter@0": slow, "sorter@1": plain})

    def read(content: str, **extra: Any) -> int:
        messages: Any = [{"role": "user", "content": content}]
        made = client.chat.completions.create(model="slow", messages=messages, max_tokens=2, extra_body=extra)
        assert made.usage is not None
        return made.usage.prompt_tokens

    assert read("7 3", chat_template_kwargs={"extra": "1 2"}) == read("7 3") + 3
    with ThreadPoolExecutor(1) as others, pytest.raises(sdk.BadRequestError, match=r"it takes over 0\.5 s"):
        answer = others.submit(greedy, client, "bot")
        read("loop")
    assert answer.result() and read("7 3") == 3  # by another process


def test_too_many_requests_get_a_retry_after(
    client: OpenAI, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.gateway.limits, "of_one", 0)
    with pytest.raises(sdk.RateLimitError) as caught:
        greedy(client, "bot")
    assert caught.value.response.headers["retry-after"] == "1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_on_tcp_a_token_is_needed(tmp_path: Path, world: World) -> None:
    secret = "correct-horse-battery"
    tokens, home, port = tmp_path / "tokens.yaml", Home(tmp_path / "home"), free_port()
    tokens.write_text(f"alice: {secret}\n")
    tokens.chmod(0o600)
    home.root.mkdir()
    write_table(home, {"bot": "sorter@0"}, {"sorter@0": entry(world.running, world.root, world.versions[0])})
    with running_gateway(home, GatewaySettings(port, tokens)):
        until(lambda: answers(port))
        url = f"http://127.0.0.1:{port}/v1"
        with httpx2.Client() as inner, contextlib.closing(inner):
            knows = OpenAI(base_url=url, api_key=secret, http_client=inner, max_retries=0)
            assert greedy(knows, "bot")
            with pytest.raises(sdk.AuthenticationError) as caught:
                greedy(OpenAI(base_url=url, api_key="guess", http_client=inner, max_retries=0), "bot")
            assert caught.value.code == "invalid_api_key"
            tokens.chmod(0o644)
            with pytest.raises(sdk.AuthenticationError):
                greedy(knows, "bot")


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(DEADLINE)
        return probe.connect_ex(("127.0.0.1", port)) == 0
