"""Notifications by apprise, to a service on this machine."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lorad.errors import SpecError
from lorad.notify.deliver import refuse_unfit
from lorad.notify.services import send
from lorad.notify.table import Undelivered
from lorad.spec.notify import Notify
from tests.notify.test_webhook import MESSAGE, Receiver, secret


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    opened = Receiver()
    await opened.server.start_server()
    yield opened
    await opened.server.close()


def to_service(receiver: Receiver, directory: Path, path: str) -> Notify:
    address = receiver.url(path).replace("http://", "json://ada:s3cret@")
    return Notify(url_file=secret(directory, "address", address), form="apprise", timeout=20)


async def test_a_service_gets_title_and_text(receiver: Receiver, tmp_path: Path) -> None:
    await send(to_service(receiver, tmp_path, "/200/x"), MESSAGE)
    ((_, headers, body),) = receiver.got
    assert headers["Authorization"].startswith("Basic ")
    assert b"lorad: a alarm" in body and b"KL <0.7> & @everyone" in body and b"warning" in body


@pytest.mark.parametrize("status", [302, 500])
async def test_a_refusal_tells_nothing_secret(
    receiver: Receiver, tmp_path: Path, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Undelivered, match="JSON did not take it"):
        await send(to_service(receiver, tmp_path, f"/{status}/x"), MESSAGE)
    assert len(receiver.got) == 1  # a redirection is not followed
    assert "s3cret" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("address", ["nosuch://s3cret", "", "tgram://"])
def test_an_unknown_service_is_refused_before(tmp_path: Path, address: str) -> None:
    to = Notify(url_file=secret(tmp_path, "address", address), form="apprise")
    with pytest.raises(SpecError) as refused:
        refuse_unfit([to], tmp_path)
    assert str(refused.value).startswith("notify[0]") and "s3cret" not in str(refused.value)


def test_a_missing_package_is_refused_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    to = Notify(url_file=secret(tmp_path, "address", "json://localhost"), form="apprise")
    with pytest.raises(SpecError, match="not installed"):
        refuse_unfit([to], tmp_path)


@pytest.mark.parametrize("more", [{"url": "https://example.org"}, {"url_file": "x", "token_file": "y"}])
def test_an_address_of_apprise_stands_in_a_file(more: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="url_file"):
        Notify(form="apprise", **more)  # type: ignore[arg-type]
