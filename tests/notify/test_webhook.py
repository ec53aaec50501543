"""Notifications for web addresses, against a server on this machine."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lorad.notify.deliver import deliver
from lorad.notify.outbox import message_of
from lorad.notify.table import AlarmFacts, Delivery, Message, Undelivered
from lorad.notify.webhook import post
from lorad.spec.notify import Notify

MESSAGE = message_of("alarm", 1000.0, {"run": "a"}, AlarmFacts("bad", "kl", "KL <0.7> & @everyone"))


class Receiver:
    """Answers /STATUS with that status, and keeps what it got."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any, bytes]] = []
        app = web.Application()
        app.router.add_post("/{status}/{rest:.*}", self._answer)
        self.server = TestServer(app)

    async def _answer(self, request: web.Request) -> web.Response:
        self.got.append((request.path, request.headers, await request.read()))
        more = {"Location": "/200/elsewhere", "Retry-After": "7"}
        return web.Response(status=int(request.match_info["status"]), headers=more)

    def url(self, path: str) -> str:
        return str(self.server.make_url(path))


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    await made.server.start_server()
    yield made
    await made.server.close()


def secret(directory: Path, name: str, text: str, mode: int = 0o600) -> str:
    (directory / name).write_text(text + "\n")
    (directory / name).chmod(mode)
    return str(directory / name)


async def test_json_is_posted_with_id_and_token(receiver: Receiver, tmp_path: Path) -> None:
    token = secret(tmp_path, "token", "tok123")
    await post(Notify(url=receiver.url("/200/x"), token_file=token), MESSAGE)
    ((_, headers, body),) = receiver.got
    assert msgspec.json.decode(body, type=Message) == MESSAGE
    assert (headers["Authorization"], headers["Idempotency-Key"]) == ("Bearer tok123", MESSAGE.id)


@pytest.mark.parametrize(
    ("form", "body"),
    [
        ("slack", b'{"text":"a: KL &lt;0.7&gt; &amp; @everyone"}'),
        ("discord", b'{"content":"a: KL <0.7> & @everyone","allowed_mentions":{"parse":[]}}'),
        ("ntfy", b"a: KL <0.7> & @everyone"),
    ],
)
async def test_forms_are_what_services_take(receiver: Receiver, form: Any, body: bytes) -> None:
    await post(Notify(url=receiver.url("/200/x"), form=form), MESSAGE)
    assert receiver.got[0][2] == body
    assert (receiver.got[0][1].get("Title") == "lorad: a alarm") == (form == "ntfy")


@pytest.mark.parametrize(("status", "wait"), [(302, 0.0), (404, 7.0), (429, 7.0), (500, 7.0)])
async def test_refusals_are_told_without_the_address(
    receiver: Receiver, tmp_path: Path, status: int, wait: float
) -> None:
    place = secret(tmp_path, "url", receiver.url(f"/{status}/s3cret"))
    with pytest.raises(Undelivered) as refused:
        await post(Notify(url_file=place), MESSAGE)
    assert str(status) in str(refused.value) and "s3cret" not in str(refused.value)
    assert refused.value.wait == wait and len(receiver.got) == 1  # a redirection is not followed


async def test_nobody_there_is_told_without_the_address(tmp_path: Path) -> None:
    place = secret(tmp_path, "url", "http://127.0.0.1:9/s3cret")
    with pytest.raises(Undelivered, match="cannot be reached") as refused:
        await post(Notify(url_file=place), MESSAGE)
    assert "s3cret" not in str(refused.value)


async def test_secret_that_others_may_read_stays_here(receiver: Receiver, tmp_path: Path) -> None:
    token = secret(tmp_path, "token", "tok123", 0o644)
    with pytest.raises(Undelivered, match="readable by others"):
        await deliver(Delivery("1", Notify(url=receiver.url("/200/x"), token_file=token), MESSAGE))
    assert not receiver.got
